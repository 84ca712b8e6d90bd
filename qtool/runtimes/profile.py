"""What an ONNX Runtime session executed: its own profile, read as kernels.

The profile is a JSON list of timed events; those of category ``Node`` whose name ends in
``_kernel_time`` are the executed kernels, each with the provider that ran it and the types and shapes
of its inputs and outputs. The format of a kernel's arithmetic is that of its first input, which for a
convolution or a matrix product is the activation; kernels that quantize that input themselves are
named apart. MatMulNBits does so on the CPU where the runtime made it of a dequantized weight, or its file says so;
where not, an x86 CPU computes float16 in float32.

A node is about *shapes* when everything it reads and writes is small and at most one-dimensional, or
is an integer computed from a shape: those belong on the CPU beside any accelerator.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError
from qtool.runtimes.base import Kernel, ProviderError
from qtool.system.machine import is_x86
from qtool.units import few

_QUANTIZES_ITS_INPUT = {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
BLOCK_PRODUCT = "MatMulNBits"
InFloat = Callable[[str], bool]
_NAMES = {"float": "float32", "double": "float64", "uint8": "int8"}
_SHAPE_OPS = {"Shape", "Size", "ConstantOfShape", "Range", "MemcpyFromHost", "MemcpyToHost"}
_SHAPE_TYPES = {"int64", "int32", "bool"}
_SMALL = 16


def read_profile(
    path: Path, runs: int = 1, in_float: Callable[[], InFloat] = lambda: lambda _: False
) -> tuple[Kernel, ...]:
    """The kernels of one run, in order, each with its median time over all ``runs`` that were profiled.

    ``in_float``, called where a MatMulNBits ran, gives what tells those that leave what they read as it is, by name.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QtoolError(
            f"'{path}'", "ONNX Runtime's profile", str(error), "run again, with space for temporary files"
        ) from error
    found = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    each, named = len(found) // runs, functools.cache(in_float)
    return tuple(_kernel(found[i::each], named) for i in range(each))


def _kernel(repeats: list[dict[str, Any]], in_float: Callable[[], InFloat]) -> Kernel:
    """One kernel from its events, one a run: a sequential session executes its nodes in the same order every time."""
    event = repeats[0]
    arguments = event["args"]
    op, tensors = arguments.get("op_name", "?"), _tensors(arguments)
    inputs = [next(iter(entry)) for entry in arguments.get("input_type_shape", [])]
    first = inputs[0] if inputs else "unknown"
    name, provider = event["name"].removesuffix("_kernel_time"), arguments.get("provider", "?")
    by_itself = op == BLOCK_PRODUCT and provider == "CPUExecutionProvider" and not in_float()(name)
    widened = op == BLOCK_PRODUCT and provider == "CPUExecutionProvider" and first == "float16" and is_x86()
    dtype = "int8" if op in _QUANTIZES_ITS_INPUT or by_itself else "float32" if widened else _NAMES.get(first, first)
    largest = max((_count(shape) for _, shape in tensors), default=None)
    return Kernel(
        name=name,
        op=f"shape:{op}" if _is_about_shapes(op, tensors) else op,
        dtype=dtype,
        provider=provider,
        num_elements=largest,
        seconds=statistics.median(e["dur"] for e in repeats) / 1e6 if all("dur" in e for e in repeats) else None,
    )


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, list[int]]]:
    entries = [*arguments.get("input_type_shape", []), *arguments.get("output_type_shape", [])]
    return [(kind, shape) for entry in entries for kind, shape in entry.items()]


def _count(shape: list[int]) -> int:
    return math.prod(shape)


def _is_about_shapes(op: str, tensors: list[tuple[str, list[int]]]) -> bool:
    if op in _SHAPE_OPS:
        return True
    return bool(tensors) and all(
        kind in _SHAPE_TYPES or (len(shape) <= 1 and _count(shape) <= _SMALL) for kind, shape in tensors
    )


def check_placement(where: str, kernels: Iterable[Kernel], provider: str) -> list[str]:
    """The names of shape nodes that ran beside ``provider`` (a provider's full name), which is as it should be.

    Raises ProviderError where any other node ran elsewhere, naming the first of them and their number.
    """
    elsewhere = [k for k in kernels if k.provider != provider]
    compute = [k for k in elsewhere if not k.op.startswith("shape:")]
    if compute:
        first = few([f"{k.name} ({k.op} on {k.provider})" for k in compute])
        raise ProviderError(
            where, f"every compute node on {provider}", f"{len(compute)} elsewhere: {first}",
            "use a provider that has these operators, or export without them",
        )  # fmt: skip
    return [k.name for k in elsewhere]
