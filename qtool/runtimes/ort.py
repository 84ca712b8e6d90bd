"""ONNX Runtime: the providers ``cpu``, ``cuda`` and ``tensorrt``.

ONNX Runtime tries hard to run a model somewhere: asked for CUDA on a machine without it, it logs a
line and gives a session on the CPU; an operator that the asked provider lacks runs on the CPU between
two copies. Both turn a measurement into one of something else, so both are found here and refused:
the first from the providers that the session really has, the second from the session's own profile.
Operations on shapes belong on the CPU and are listed, not refused.

On CUDA a session is made for CUDA graphs where the model allows it (everything on the GPU, no control
flow), and without them where it does not; ``cuda_graph`` tells which. TensorRT's provider records one
graph a session, whatever ``gpu_graph_id`` says, and replays it for every later run, of other inputs and
shapes too: there is none there.

The file's arithmetic on the CPU provider: FP16 is storage only where the provider has no half kernels
(weights are cast to float32 when the model is loaded, or around each operator); INT8 needs QDQ pairs
that the runtime fuses. What became of either is read from the runtime's optimised graph or profile.

Left out on purpose: inter-op parallelism (one operator at a time, so that threads mean one thing), and
thread spinning after a run has ended, which would steal time from whatever is measured next.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from qtool.errors import QtoolError
from qtool.runtimes.base import (
    Array,
    Kernel,
    ProviderError,
    TensorInfo,
    all_graphs,
    check_feeds,
    failed_run,
    refused_type,
)
from qtool.runtimes.onnx_notes import EXACT_SUMS, needs_exact_sums
from qtool.runtimes.ort_errors import cure, reason
from qtool.runtimes.packages import missing_library, refuse_conflict
from qtool.runtimes.profile import BLOCK_PRODUCT, read_profile

if TYPE_CHECKING:
    import onnx

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_INSTALL = {
    "cuda": "pip install 'onnxruntime-gpu[cuda,cudnn]' and an NVIDIA driver, or use --provider cpu",
    "tensorrt": "pip install onnxruntime-gpu 'tensorrt-cu13<11' and an NVIDIA driver, or use --provider cuda",
}
_DTYPES = {
    "float": "float32", "double": "float64", "float16": "float16", "bool": "bool", "int8": "int8",
    "uint8": "uint8", "int16": "int16", "uint16": "uint16", "int32": "int32", "uint32": "uint32",
    "int64": "int64", "uint64": "uint64",
}  # fmt: skip
_ERRORS_ONLY = 3
_IN_BYTES = 4
"""The accuracy level at which MatMulNBits rounds what it reads to 8 bits."""


class OrtSession:
    """An ONNX file opened by ONNX Runtime on one provider. See :class:`qtool.runtimes.base.Session`."""

    def __init__(
        self, path: Path, *, provider: str = "cpu", threads: int = 1, optimize: bool = True, rounds: bool = True
    ) -> None:
        """Without ``rounds``, what stored integers alone are multiplied by stays float32 (see MatMulNBits).

        Raises ProviderError where the provider is absent or would be replaced, QtoolError for a bad file.
        """
        self.path, self.provider, self.threads, self.optimize = path, provider, threads, optimize
        require(provider)
        self.device = "cpu" if provider == "cpu" else "cuda"
        options = _options(threads, optimize)
        if not rounds:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        self._session, self.cuda_graph = _create_with_graph(path, provider, options)
        _refuse_fallback(provider, self._session.get_providers())
        self.inputs = tuple(_info(path, value) for value in self._session.get_inputs())
        self._computed = self._session.get_outputs()
        self.outputs = tuple(_info(path, value) for value in self._computed if not _is_object(value))
        self.others = tuple(f"'{value.name}' ({value.type})" for value in self._computed if _is_object(value))

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Computes the outputs for host arrays. Raises QtoolError for inputs that do not fit."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        session = self._session
        option = self._unrecorded()
        values = self._call(lambda: session.run(None, dict(feeds), option))
        named = {told.name: value for told, value in zip(self._computed, values, strict=True)}
        # uint64 comes as C's unsigned long long, which numpy tells from its own of that size and torch refuses
        return [np.asarray(named[info.name]).view(info.dtype) for info in self.outputs]

    def prepare(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """A call that computes once with inputs and outputs where the computation is."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        if self.provider == "cpu":
            return self._step(dict(feeds))
        from qtool.runtimes.binding import bind

        session, names = self._session, [info.name for info in self.outputs]
        step: Callable[[], None] = self._call(lambda: bind(session, feeds, names, record=self.cuda_graph))
        return step

    def kernels(self, feeds: Mapping[str, Array], runs: int = 1) -> tuple[Kernel, ...]:
        """What ran for ``feeds``, from the profile of a second session with the same options, over ``runs`` runs."""
        check_feeds(f"'{self.path}'", self.inputs, feeds)
        with tempfile.TemporaryDirectory() as folder:
            options = _options(self.threads, self.optimize)
            options.enable_profiling = True
            options.profile_file_prefix = os.path.join(folder, "profile")
            session = _create(self.path, self.provider, options)
            for _ in range(runs):
                self._call(lambda: session.run(None, dict(feeds)))
            return read_profile(Path(session.end_profiling()), runs, lambda: _unrounded(self.path))

    def close(self) -> None:
        """Frees the model; the session cannot be used afterwards."""
        del self._session

    def _unrecorded(self) -> Any:
        """Run options for a run with arrays of its own, which a recorded CUDA graph could not be replayed on."""
        if not self.cuda_graph:
            return None
        from qtool.runtimes.binding import graph_options

        return graph_options("-1")

    def _step(self, feeds: dict[str, Array]) -> Callable[[], None]:
        """One run, with nothing around it that would be timed as well."""
        session = self._session

        def step() -> None:
            try:
                session.run(None, feeds)
            except Exception as error:
                raise self._failed(error) from error

        return step

    def _call(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> QtoolError:
        return failed_run(self.path, f"ONNX Runtime on {self.provider}", reason(error), self.inputs)


def open_file(
    path: Path,
    *,
    provider: str = "cpu",
    threads: int = 1,
    optimize: bool = True,
    precision: str | None = None,
    device: str | None = None,
) -> OrtSession:
    """The session that ``open_session`` asks for; an ONNX file brings its own precision, a provider its device."""
    if precision is not None:
        raise QtoolError(
            f"'{path}'", "an ONNX file in the precision asked for", f"precision {precision!r} for ONNX Runtime",
            "export a file in that precision, or use --provider torch",
        )  # fmt: skip
    return OrtSession(path, provider=provider, threads=threads, optimize=optimize)


def optimized_graph(path: Path, *, weights: bool = True, provider: str = "cpu") -> onnx.ModelProto:
    """The graph as ONNX Runtime executes it: after its own fusions for ``provider``.

    Every node is a kernel; QDQ pairs that were fused appear as QLinearConv, QGemm and so on. With
    ``weights`` off, initializers of external data are left on disk, unread. Raises like opening the file.
    """
    import onnx

    require(provider)
    with tempfile.TemporaryDirectory() as folder:
        options = _options(1, True)
        options.optimized_model_filepath = os.path.join(folder, "optimized.onnx")
        if _bytes_on_disk(path) > 1 << 30:  # near protobuf's 2 GiB the weights go into a file of their own
            key = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(key, "optimized.data")
        session = _create(path, provider, options)
        _refuse_fallback(provider, session.get_providers())
        return onnx.load(options.optimized_model_filepath, load_external_data=weights)


def _bytes_on_disk(path: Path) -> int:
    return sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*") if p.is_file())


def _options(threads: int, optimize: bool) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.log_severity_level = _ERRORS_ONLY  # its warnings are about its own choices, such as node placement
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _create(path: Path, provider: str, options: Any, *, record: bool = False) -> Any:
    """An InferenceSession on ``provider``, its errors made one line."""
    if not path.is_file():
        raise ProviderError.no_file(path)
    try:
        if provider == "cpu" and needs_exact_sums(path):
            options.add_session_config_entry(EXACT_SUMS, "1")
        for key, value in _for_a_gpu(path, provider):
            options.add_session_config_entry(key, value)
        with _quiet(provider):
            session = ort.InferenceSession(str(path), options, providers=_provider_list(path, provider, record))
        session.disable_fallback()  # or a run that fails on an accelerator is made again on another, without a word
        return session
    except Exception as error:
        raise QtoolError(
            f"'{path}'", f"an ONNX file that ONNX Runtime {ort.__version__} can load", reason(error), cure(error)
        ) from error


def _create_with_graph(path: Path, provider: str, options: Any) -> tuple[Any, bool]:
    """A session that replays a CUDA graph where provider and model can, and whether it does."""
    if provider != "cuda":
        return _create(path, provider, options), False
    try:
        return _create(path, provider, options, record=True), True
    except QtoolError:  # control flow, or a node beside the GPU; any other cause comes up again at once
        return _create(path, provider, options), False


def _provider_list(path: Path, provider: str, record: bool) -> list[Any]:
    """The provider and, behind an accelerator, the CPU for operations on shapes.

    float32 is computed as float32, not TF32, and TensorRT may use FP16 only for a file that is not FP32.
    """
    if provider == "cpu":
        return [PROVIDERS["cpu"]]
    cuda = (PROVIDERS["cuda"], {"use_tf32": "0", "enable_cuda_graph": "1" if record else "0"})
    if provider == "cuda":
        return [cuda, PROVIDERS["cpu"]]
    half, integer = _lower_formats(path)
    options = {"trt_fp16_enable": str(half or integer), "trt_int8_enable": str(integer)}  # 1 and 0 it refuses
    return [(PROVIDERS["tensorrt"], options), cuda, PROVIDERS["cpu"]]


def _for_a_gpu(path: Path, provider: str) -> Iterator[tuple[str, str]]:
    """What keeps biases in float there: neither CUDA's provider nor TensorRT has an operator that reads them in int32.

    A quantized layer's float bias the runtime would make int32 for its integer kernels on the CPU. Of a file that has
    them so, constants are dequantized as it is opened, which is done without looking for integer kernels: CUDA's
    provider has none.
    """
    if provider == "cpu":
        return
    yield "optimization.disable_specified_optimizers", "WeightBiasQuantization"
    if provider == "cuda" and _has_integer_biases(path):
        yield "session.disable_quant_qdq", "1"


def _has_integer_biases(path: Path) -> bool:
    """Whether a file dequantizes constants of int32."""
    import onnx

    for graph in all_graphs(onnx.load(path, load_external_data=False).graph):
        wide = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT32}
        if any(node.op_type == "DequantizeLinear" and node.input[0] in wide for node in graph.node):
            return True
    return False


def _unrounded(path: Path) -> Callable[[str], bool]:
    """Whether a node of a file, by its name, multiplies stored integers by floats as they are, at the file's word.

    What the runtime makes of a dequantized weight is no node of the file's, and rounds. Nodes without a name are known
    where the file has but one kind of them.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    bodies = [graph for body in (model.graph, *model.functions) for graph in all_graphs(body)]
    products = [node for body in bodies for node in body.node if node.op_type == BLOCK_PRODUCT]
    kinds = {tensor.name: tensor.data_type for body in bodies for tensor in getattr(body, "initializer", ())}
    rounding = {node.name for node in products if _is_in_bytes(node, kinds)}
    floats = {node.name for node in products if not _is_in_bytes(node, kinds)}
    return lambda name: name in floats or ("" in floats - rounding and name not in rounding)


def _is_in_bytes(product: Any, kinds: Mapping[str, int]) -> bool:
    """Whether a product rounds what it reads: where it may, and there is a kernel for its weights.

    There is none where zero points are no integers (HQQ) or inputs have an order of groups (GPTQ's ``act_order``), and
    with 2 bits for the shortest and the longest blocks.
    """
    import onnx

    told = {attribute.name: attribute.i for attribute in product.attribute}
    zero_points, order = [*product.input[3:5], "", ""][:2]
    has_kernel = told.get("bits") != 2 or 32 <= told["block_size"] <= 128
    plain = not order and kinds.get(zero_points, onnx.TensorProto.UINT8) == onnx.TensorProto.UINT8
    return told.get("accuracy_level") == _IN_BYTES and has_kernel and plain


def _lower_formats(path: Path) -> tuple[bool, bool]:
    """Whether the file has FP16 weights, and whether it quantizes."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    return half, any(node.op_type == "QuantizeLinear" for node in graph.node)


@contextlib.contextmanager
def _quiet(provider: str) -> Iterator[None]:
    """Silences what ONNX Runtime prints when an accelerator is absent; the error raised here says it better."""
    if provider == "cpu":
        yield
        return
    ort.set_default_logger_severity(4)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        ort.set_default_logger_severity(_ERRORS_ONLY)


def require(provider: str, device: str = "auto") -> None:
    """Raises ProviderError unless this build of ONNX Runtime has the provider."""
    refuse_conflict(provider)
    if PROVIDERS[provider] not in ort.get_available_providers():
        raise ProviderError(
            f"provider '{provider}'", f"an ONNX Runtime with {PROVIDERS[provider]}",
            f"onnxruntime {ort.__version__} with {', '.join(ort.get_available_providers())}", _INSTALL[provider],
        )  # fmt: skip
    if provider != "cpu" and hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()  # finds CUDA and cuDNN in pip's nvidia packages
    if provider == "tensorrt":
        with contextlib.suppress(ImportError, OSError, RuntimeError):  # what is missing is told of the session
            importlib.import_module("tensorrt")  # loads its libraries, which pip puts where no loader looks


def _refuse_fallback(provider: str, got: list[str]) -> None:
    """Raises ProviderError where the session came out on another provider than the one asked for."""
    if got and got[0] == PROVIDERS[provider]:
        return
    library = Path(ort.__file__).parent / "capi" / _library_name(provider)
    missing = missing_library(library)
    reason = f"{missing} cannot be loaded" if missing else "no usable device"
    raise ProviderError(
        f"provider '{provider}'", f"a session on {PROVIDERS[provider]}",
        f"{reason}, and ONNX Runtime fell back to {', '.join(got)}", f"install what is missing: {_INSTALL[provider]}",
    )  # fmt: skip


def _library_name(provider: str) -> str:
    stem = f"onnxruntime_providers_{provider}"
    return f"{stem}.dll" if os.name == "nt" else f"lib{stem}.so"


def _is_object(value: Any) -> bool:
    """Whether an output comes as text, a list or a dict, as a classifier's of scikit-learn do, and as no numbers."""
    return value.type == "tensor(string)" or not value.type.startswith("tensor(")


def _info(path: Path, value: Any) -> TensorInfo:
    """An input or output, whose shape is None for a scalar too: ONNX Runtime gives [] for either."""
    kind = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if kind is None or kind[1] not in _DTYPES:
        raise refused_type(path, value.name, value.type)
    shape = tuple(d if isinstance(d, int | str) and d != "" else None for d in value.shape)
    return TensorInfo(value.name, _DTYPES[kind[1]], shape or None)
