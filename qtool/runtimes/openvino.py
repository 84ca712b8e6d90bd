"""OpenVINO, through its own runtime (``pip install 'qtool[openvino]'``).

ONNX Runtime has an OpenVINO provider too, but as a package of its own that excludes the others; the
runtime itself reads the same ONNX files. A QDQ pair becomes OpenVINO's FakeQuantize and is fused by
its CPU plugin.

On CPUs with bfloat16 units OpenVINO computes the floats of any file in bfloat16 unless it is told otherwise, and FP32
would not mean FP32. So its precision hint is always set: to float32, to half where the file's weights are half and
the CPU computes in it, or to what ``precision`` asks for. :func:`own_precision` tells what it would have taken.

A layer that reads floats and unpacks integer weights is told in the format of these. What it computes in was found by
its results: where the CPU has VNNI and as many weights share a scale as it rounds inputs by (32), in 8 bits, whatever
the weights have; elsewhere in float.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtool.errors import QtoolError, one_line
from qtool.runtimes.base import Array, Kernel, ProviderError, TensorInfo, check_feeds, failed_run, refused_type
from qtool.system.imports import imported
from qtool.system.machine import VNNI, cpu_info

_NAMES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "int8", "i8": "int8", "i32": "int32", "u4": "int4",
    "i4": "int4", "u2": "int2", "i2": "int2",
}  # fmt: skip
PRECISIONS = {"fp16": ("f16", "FP16"), "bf16": ("bf16", "BF16")}
"""OpenVINO's names for a precision and for a CPU's ability to compute in it."""
_NUMBERS = {"f16", "f32", "f64", "boolean", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}
"""What numpy has. OpenVINO gives bfloat16 and what is shorter than a byte as the bits of another type."""
_NOT_EXECUTED = {"Input", "Output", "Const"}


class OpenVinoSession:
    """An ONNX file compiled by OpenVINO for the CPU. See :class:`qtool.runtimes.base.Session`."""

    provider = "openvino"
    device = "cpu"
    others = ()

    def __init__(self, path: Path, *, threads: int = 1, precision: str | None = None) -> None:
        """Raises ProviderError where openvino is not installed, QtoolError for a file it cannot read.

        With ``precision`` (``fp16``, ``bf16``) floats are computed in it, which a CPU without it is refused.
        """
        self.path, self.threads, self._precision = path, threads, precision
        self.stored = _NAMES[PRECISIONS[precision][0]] if precision else None
        self._model = _compile(path, threads, precision)
        self._request = self._model.create_infer_request()
        self.inputs = tuple(_info(path, port) for port in self._model.inputs)
        self.outputs = tuple(_info(path, port) for port in self._model.outputs)

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Computes the outputs for host arrays. Raises QtoolError for inputs that do not fit."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        try:
            results = self._request.infer(dict(feeds))
        except Exception as error:
            raise self._failed(error) from error
        return [np.array(results[port]) for port in self._model.outputs]

    def prepare(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """A call that computes once; inputs are shared with the runtime, not copied."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        request, values = self._request, {name: np.asarray(value, order="C") for name, value in feeds.items()}

        def step() -> None:
            try:
                request.infer(values, share_inputs=True, share_outputs=True)
            except Exception as error:
                raise self._failed(error) from error

        return step

    def _failed(self, error: Exception) -> QtoolError:
        return failed_run(self.path, "OpenVINO", _reason(error), self.inputs)

    def kernels(self, feeds: Mapping[str, Array], runs: int = 0) -> tuple[Kernel, ...]:
        """The executed operations, from the compiled model's own runtime graph, timed over ``runs`` runs if asked.

        Times are those of a second model with OpenVINO's counters on; what was fused into another operation took none.
        """
        kernels, seconds = [], self._seconds(feeds, runs) if runs else {}
        for node in self._model.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            op, dtype = _text(info, "layerType"), _text(info, "runtimePrecision")
            if op not in _NOT_EXECUTED:
                name, parts = node.friendly_name, tuple(_text(info, "originalLayersNames").split(","))
                told = _NAMES.get(dtype, dtype)
                ran = self._unpacking(node) if op == "FullyConnected" else None
                kernels.append(
                    Kernel(
                        name, op, ran or told, "openvino", seconds=seconds.get(name), parts=parts,
                        stored=told if ran else None,
                    )
                )  # fmt: skip
        return tuple(kernels)

    def _unpacking(self, layer: Any) -> str | None:
        """What a layer computes in that reads float32 and integer weights with scales; None for any other."""
        source, weights, *_ = layer.inputs()
        kinds = [port.get_element_type().to_string() for port in (source, weights)]
        scales = layer.inputs()[3:4]
        if kinds[0] != "f32" or kinds[1] not in ("i8", "u8", "i4", "u4", "i2", "u2") or not scales:
            return None
        sizes = [math.prod(d.get_length() for d in port.get_partial_shape()) for port in (weights, *scales)]
        together = int(self._model.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE"))
        rounds = 0 < together <= sizes[0] // max(1, sizes[1]) and bool(set(VNNI) & set(cpu_info()["features"]))
        return "int8" if rounds else "float32"

    def _seconds(self, feeds: Mapping[str, Array], runs: int) -> dict[str, float]:
        """The median time of each operation that is executed, by its name."""
        request = _compile(self.path, self.threads, self._precision, PERF_COUNT=True).create_infer_request()
        times: dict[str, list[float]] = {}
        for _ in range(runs):
            request.infer(dict(feeds))
            for entry in request.get_profiling_info():
                if entry.status == entry.Status.EXECUTED:
                    times.setdefault(entry.node_name, []).append(entry.real_time.total_seconds())
        return {name: statistics.median(taken) for name, taken in times.items()}

    def close(self) -> None:
        """Frees the model; the session cannot be used afterwards."""
        del self._request, self._model


def open_file(
    path: Path,
    *,
    provider: str = "openvino",
    threads: int = 1,
    optimize: bool = True,
    precision: str | None = None,
    device: str | None = None,
) -> OpenVinoSession:
    """The session that ``open_session`` asks for. OpenVINO has no switch for its optimisations."""
    if not optimize:
        raise QtoolError(
            f"'{path}'", "OpenVINO's own optimisation", "optimize off", "leave it on: OpenVINO has no switch for it"
        )
    if precision is not None:
        _require_precision(precision)
    return OpenVinoSession(path, threads=threads, precision=precision)


def own_precision() -> str:
    """What OpenVINO computes floats in on this CPU where no precision is asked of it, such as ``bfloat16``."""
    chosen: str = _core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    return _NAMES.get(chosen, chosen)


def _require_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise QtoolError("openvino", f"precision {' or '.join(PRECISIONS)}", repr(precision), "choose one of them")
    if not _computes(_core(), precision):
        raise ProviderError(
            "provider 'openvino'", f"a CPU that OpenVINO computes {precision} on", "one without such instructions",
            f"leave {precision} out, or measure on a CPU that has them",
        )  # fmt: skip


def _computes(core: Any, precision: str) -> bool:
    return PRECISIONS[precision][1] in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _hint(core: Any, model: Any, precision: str | None) -> str:
    """OpenVINO's name of what floats are computed in: what is asked for, or else the file's own format."""
    if precision is None and _is_half(model) and _computes(core, "fp16"):
        precision = "fp16"
    return PRECISIONS[precision][0] if precision else "f32"


def _is_half(model: Any) -> bool:
    """Whether most of the weights are in half precision."""
    held: Counter[str] = Counter()
    for op in model.get_ops():
        if op.get_type_name() == "Constant":
            held[op.get_element_type().to_string()] += math.prod(op.get_output_shape(0))
    return bool(held) and max(held, key=lambda kind: held[kind]) == "f16"


def _compile(path: Path, threads: int, precision: str | None, **more: Any) -> Any:
    openvino = _require()
    _require_unforked()
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    try:
        core = _core()
        model = core.read_model(str(path))
        return core.compile_model(
            model, "CPU", hints | {"INFERENCE_PRECISION_HINT": _hint(core, model, precision)} | more
        )
    except Exception as error:
        expected = f"a model that OpenVINO {openvino.__version__.partition('-')[0]} can compile"
        raise QtoolError(f"'{path}'", expected, _reason(error), _cure(error)) from error


def is_installed() -> bool:
    """Whether OpenVINO is there to be imported."""
    return importlib.util.find_spec("openvino") is not None


def require(provider: str, device: str = "auto") -> None:
    """Raises ProviderError unless the package is there."""
    _require()


def _require() -> Any:
    return imported("openvino", "provider 'openvino'", "qtool[openvino]", ProviderError)


@functools.cache
def _core() -> Any:
    """OpenVINO's core, one for as long as the process lives.

    On a CPU with AMX its plugin (2026.4) has signals handled on memory of its own, and frees that with the core. Where
    a second one was made since, or the last is let go in another thread, signals are still sent there afterwards: the
    first that comes, of an interrupt or of a data loader's process that has ended, ends this one.
    """
    return _require().Core()


def _require_unforked() -> None:
    """Raises ProviderError in a fork of a process that has compiled a file.

    OpenVINO keeps the threads of a file that was closed for the next one. A fork does not have them, and would wait for
    them for ever.
    """
    if _user() != os.getpid():
        raise ProviderError(
            "provider 'openvino'", "a process of its own, or one forked before OpenVINO was used",
            "a fork of one that has used it", "start it by multiprocessing's 'spawn' or 'forkserver'",
        )  # fmt: skip


@functools.cache
def _user() -> int:
    """The process that was the first to ask."""
    return os.getpid()


def _info(path: Path, port: Any) -> TensorInfo:
    kind = port.get_element_type()
    shape = tuple(d.get_length() if d.is_static else None for d in port.get_partial_shape())
    own = port.get_node().get_friendly_name()  # a conversion behind an input adds its name to the others
    name = own if own in port.get_names() or not port.get_names() else port.get_any_name()
    if kind.to_string() not in _NUMBERS:
        raise refused_type(path, name, kind.to_string())
    return TensorInfo(name, str(np.dtype(kind.to_dtype())), shape)


def _text(info: Any, key: str) -> str:
    if key not in info:
        return "unknown"
    value = info[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def _reason(error: Exception) -> str:
    """The last sentence of OpenVINO's nested message, which holds the cause, and the node that it was met at."""
    text = re.sub(r"Check '.*' failed at \S+:\d+:", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    around = ("Exception from", "FrontEnd API", "Summary", "-- Conversion is failed", "While validating node")
    return one_line(" ".join(line for line in lines if not line.startswith(around)) or error)[:300]


def _cure(error: Exception) -> str:
    text = str(error)
    if "outside the base directory" in text:
        return "put the external data file beside the model, and name it there without folders"
    if any(words in text for words in ("can't be parsed", "Unable to read", "externally stored", "external data")):
        return "check that the file is complete and is ONNX"
    return (
        "leave what OpenVINO refuses out of the model, or write it another way; "
        "ONNX Runtime may run it: --target ort-cpu, or --provider cpu for files"
    )
