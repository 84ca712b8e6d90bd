"""What every runtime gives: a session, its tensors, and the kernels that really ran.

A session is opened on one provider and runs there or not at all. Besides ``run`` it has ``prepare``,
which puts the inputs where the computation is and returns a call that computes once and comes back
when the result is complete, so that a timer around it measures the model and not the copying; and
``kernels``, which tells from the runtime's own record what was executed, in which number format and
on which provider. A claim such as "this runs in INT8" is read from there, never from the file's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qtool.errors import QtoolError

Array = npt.NDArray[Any]


class ProviderError(QtoolError):
    """A provider that is missing, half installed, or would not run what was asked of it. Exit code 1."""

    @staticmethod
    def no_file(path: Path) -> QtoolError:
        """The error for a path that is no file."""
        got = "a folder" if path.is_dir() else "no such file"
        return QtoolError(f"'{path}'", "a model file", got, "check the path")


def to_array(value: Any) -> Array:
    """A tensor or array as a contiguous array on the host, of no dimensions where it has none; bfloat16 as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value, order="C")


def refused_type(path: Path, name: str, kind: str) -> QtoolError:
    """The error for an input or output that numpy cannot hold: its bits would be taken for other numbers."""
    return QtoolError(
        f"'{path}': '{name}'", "a tensor of numbers of a type that numpy has", kind,
        "use a model whose inputs and outputs are such tensors, or cast them within it",
    )  # fmt: skip


def failed_run(path: Path, runtime: str, reason: str, inputs: Iterable[TensorInfo]) -> QtoolError:
    """The error for a run that the runtime gave up."""
    shapes = ", ".join(f"'{info.name}' {info}" for info in inputs)
    return QtoolError(
        f"'{path}'", f"{runtime} to compute it", reason,
        f"check the model, and that its inputs fit together: {shapes}",
    )  # fmt: skip


def all_graphs(graph: Any) -> Iterator[Any]:
    """A graph of an ONNX file, or a function's body, and the graphs within its nodes: branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_graphs(attribute.g)


@dataclass(frozen=True)
class TensorInfo:
    """One input or output: its name, numpy dtype name, and shape (an int, a symbol, or None where unknown).

    A ``shape`` of None says that the runtime does not tell even the number of dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of unknown shape"
        return f"{self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class Kernel:
    """One executed operation: ``dtype`` is the format of its arithmetic, ``provider`` where it ran.

    ``num_elements`` is the size of its largest tensor, ``seconds`` its median time, ``parts`` the file's nodes that
    were fused into it and ``stored`` the format of weights that it unpacks, where the runtime tells them.
    """

    name: str
    op: str
    dtype: str
    provider: str
    num_elements: int | None = None
    seconds: float | None = None
    parts: tuple[str, ...] = ()
    stored: str | None = None


class Session(Protocol):
    """A model opened on one provider.

    ``outputs`` are those that are tensors of numbers, which are given; ``others`` tells which are only computed.
    """

    provider: str
    device: str
    threads: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    others: tuple[str, ...]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Computes ``outputs``, in the file's order, on the host."""

    def prepare(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """Puts ``feeds`` on the device; each call of what is returned computes once, to completion."""

    def kernels(self, feeds: Mapping[str, Array]) -> tuple[Kernel, ...]:
        """What is executed for ``feeds``, by the runtime's own record (this may run the model once)."""

    def close(self) -> None:
        """Frees the model."""


class TimedSession(Session, Protocol):
    """A session in a runtime that tells how long each kernel takes."""

    def kernels(self, feeds: Mapping[str, Array], runs: int = 1) -> tuple[Kernel, ...]:
        """What is executed for ``feeds``, each with its median time over ``runs`` runs."""


_COMPUTE = ("conv", "gemm", "matmul", "fullyconnected", "attention", "lstm", "gru", "rnn", "einsum", "mlp")
_COMPUTE_IN_TORCH = ("addmm", "::mm", "::bmm", "int_mm", "linear", "dot_product")


def is_compute(op: str) -> bool:
    """Whether an operation does the multiplying that a model's time goes into (by its name).

    >>> [is_compute(op) for op in ("QLinearConv", "FusedMatMul", "Transpose", "Convert")]
    [True, True, False, False]

    Inductor names a kernel after all that went into it; of those in Triton, products are made from templates.

    >>> [is_compute(op) for op in ("triton_tem_fused__int_mm_mul_0", "triton_poi_fused_convolution_relu_1")]
    [True, False]
    """
    name = op.lower()
    if name.startswith("triton_"):
        return name.startswith("triton_tem_")
    if name.startswith("convert"):
        return False
    parts = (*_COMPUTE, *_COMPUTE_IN_TORCH) if "::" in name else _COMPUTE  # in ONNX, QuantizeLinear is no product
    return any(part in name for part in parts)


def arithmetic(kernels: Iterable[Kernel]) -> dict[str, int]:
    """How many multiplying operations ran in each number format, most frequent first."""
    return dict(Counter(k.dtype for k in kernels if is_compute(k.op)).most_common())


def check_feeds(where: str, inputs: Iterable[TensorInfo], feeds: Mapping[str, Array]) -> None:
    """Raises QtoolError unless ``feeds`` has every input, with its dtype and a shape that fits."""
    wanted = {info.name: info for info in inputs}
    if missing := [name for name in wanted if name not in feeds]:
        raise QtoolError(where, f"inputs {', '.join(wanted)}", f"no '{missing[0]}'", "feed every input by its name")
    if extra := [name for name in feeds if name not in wanted]:
        raise QtoolError(where, f"inputs {', '.join(wanted)}", f"also '{extra[0]}'", "leave it out")
    for name, info in wanted.items():
        value = np.asarray(feeds[name])
        got = f"{value.dtype}{list(value.shape)}"
        if str(value.dtype) != info.dtype or not fits(value.shape, info.shape):
            raise QtoolError(f"{where}: input '{name}'", str(info), got, "convert the input or use another model")


def fits(shape: tuple[int, ...], wanted: tuple[int | str | None, ...] | None) -> bool:
    """Whether an array of ``shape`` can be fed where ``wanted`` is asked for."""
    return wanted is None or (
        len(shape) == len(wanted) and all(not isinstance(w, int) or s == w for s, w in zip(shape, wanted, strict=True))
    )
