"""OpenVINO, through its own runtime (``pip install 'qtool[openvino]'``).

ONNX Runtime has an OpenVINO provider too, but as a package of its own that excludes the others; the
runtime itself reads the same ONNX files. A QDQ pair becomes OpenVINO's FakeQuantize and is fused by
its CPU plugin. Its precision hint is set to float32, since on CPUs with bfloat16 units it would
otherwise compute a float32 file in bfloat16, and FP32 would not mean FP32.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtool.errors import QtoolError, one_line
from qtool.runtimes.base import Array, Kernel, ProviderError, TensorInfo, check_feeds

_NAMES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "int8", "i8": "int8", "i32": "int32", "u4": "int4",
    "i4": "int4",
}  # fmt: skip
_NOT_EXECUTED = {"Input", "Output", "Const"}


class OpenVinoSession:
    """An ONNX file compiled by OpenVINO for the CPU. See :class:`qtool.runtimes.base.Session`."""

    provider = "openvino"
    device = "cpu"

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        """Raises ProviderError where openvino is not installed, QtoolError for a file it cannot read."""
        self.path, self.threads = path, threads
        self._model = _compile(path, threads)
        self._request = self._model.create_infer_request()
        self.inputs = tuple(_info(port) for port in self._model.inputs)
        self.outputs = tuple(_info(port) for port in self._model.outputs)

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Computes the outputs for host arrays. Raises QtoolError for inputs that do not fit."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        results = self._request.infer(dict(feeds))
        return [np.array(results[port]) for port in self._model.outputs]

    def prepare(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """A call that computes once; inputs are shared with the runtime, not copied."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        request, values = self._request, {name: np.ascontiguousarray(value) for name, value in feeds.items()}

        def step() -> None:
            request.infer(values, share_inputs=True, share_outputs=True)

        return step

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
                kernels.append(
                    Kernel(name, op, _NAMES.get(dtype, dtype), "openvino", seconds=seconds.get(name), parts=parts)
                )
        return tuple(kernels)

    def _seconds(self, feeds: Mapping[str, Array], runs: int) -> dict[str, float]:
        """The median time of each operation that is executed, by its name."""
        request = _compile(self.path, self.threads, PERF_COUNT=True).create_infer_request()
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
    if precision is not None or not optimize:
        raise QtoolError(
            f"'{path}'", "OpenVINO's own optimisation and the file's own precision",
            f"optimize={optimize}, precision={precision!r}", "leave both at their defaults",
        )  # fmt: skip
    return OpenVinoSession(path, threads=threads)


def _compile(path: Path, threads: int, **more: Any) -> Any:
    openvino = _require()
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    try:
        core = openvino.Core()
        return core.compile_model(core.read_model(str(path)), "CPU", hints | more)
    except Exception as error:
        raise QtoolError(
            f"'{path}'", f"a model that OpenVINO {openvino.__version__} can compile", _reason(error),
            "check that the file is complete and is standard ONNX",
        ) from error  # fmt: skip


def is_installed() -> bool:
    """Whether OpenVINO is there to be imported."""
    return importlib.util.find_spec("openvino") is not None


def _require() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise ProviderError(
            "provider 'openvino'", "the package openvino", one_line(error), "run: pip install 'qtool[openvino]'"
        ) from error
    return openvino


def _info(port: Any) -> TensorInfo:
    shape = tuple(d.get_length() if d.is_static else None for d in port.get_partial_shape())
    own = port.get_node().get_friendly_name()  # a conversion behind an input adds its name to the others
    name = own if own in port.get_names() else port.get_any_name()
    return TensorInfo(name, str(np.dtype(port.get_element_type().to_dtype())), shape)


def _text(info: Any, key: str) -> str:
    if key not in info:
        return "unknown"
    value = info[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def _reason(error: Exception) -> str:
    """The last sentence of OpenVINO's nested message, which holds the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API", "Summary"))]
    return one_line(" ".join(told) or error)[:300]
