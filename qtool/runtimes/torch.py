"""PyTorch itself as a runtime: ``torch`` runs a ``.pt2`` as it is, ``torch-compile`` through inductor.

A float ``.pt2`` can be recast (``precision`` fp16 or bf16: weights and compute, inputs and outputs kept
in float32). A quantized one holds explicit quantize and dequantize operators. Run as it is, they are
computed in float: an INT8 model simulated. Compiled for the CPU with its weights frozen (a switch of
inductor's that dynamo has to see as well, hence set around the call), they become oneDNN's integer
kernels. For CUDA inductor has no such fusion, so there the linear layers are first rewritten to integer
matrix products (:mod:`qtool.runtimes.torch_integer`), and what is left to FP16
(:mod:`qtool.runtimes.torch_half`). What came of it is told by ``kernels``, from the profiler, by the
type of each operator's first input.

Left out on purpose: compiling with a dynamic batch. Each batch size is compiled for itself, as it would
be deployed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError, one_line
from qtool.nested import to_float32
from qtool.runtimes.base import Array, Kernel, ProviderError, TensorInfo, check_feeds, is_compute
from qtool.runtimes.torch_half import graphs, halve, is_quantized
from qtool.runtimes.torch_integer import use_integer_products
from qtool.system.devices import load_inductor, move_graph, require_compilation
from qtool.system.quiet import quiet_choices, quiet_profiler

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "unsigned char": "int8", "signed char": "int8",
}  # fmt: skip
ON_A_GPU: dict[str, Any] = {
    "max_autotune_gemm": True, "max_autotune_conv_backends": "ATEN", "autotune_num_choices_displayed": 0,
    "epilogue_fusion_first": True, "loop_ordering_after_fusion": False,
}  # fmt: skip
"""What inductor is told for CUDA: to try kernels of its own for matrix products (not for convolutions, which takes
minutes, and to keep the table of them to itself), and to look first for what such a kernel can do with its result.
Loops over batch and tokens are to be one from the start, as the product's are, or they do not fit behind it."""


class TorchSession:
    """A captured graph run by PyTorch on one device. See :class:`qtool.runtimes.base.Session`.

    ``module`` takes the tensors of ``inputs`` in that order. ``stored`` is the format of most weights.
    """

    others = ()

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: tuple[TensorInfo, ...],
        *,
        outputs: tuple[TensorInfo, ...] = (),
        provider: str = "torch",
        device: str | None = None,
        threads: int = 1,
        precision: str | None = None,
        name: str = "module",
    ) -> None:
        """Raises ProviderError for CUDA where there is none, QtoolError for a precision it does not know."""
        self.device = _device(provider, device)
        if precision is not None and precision not in PRECISIONS:
            raise QtoolError(f"'{name}'", f"precision {' or '.join(PRECISIONS)}", repr(precision), "choose one of them")
        self.provider, self.threads, self.name = provider, threads, name
        self.inputs: tuple[TensorInfo, ...] = inputs
        self.outputs: tuple[TensorInfo, ...] = outputs
        self._dtype = PRECISIONS[precision] if precision else None
        self._module = module.to(self.device)
        for graph in graphs(module):
            move_graph(graph, torch.device(self.device))
        self.stored = _stored_format(module)
        self._wide: set[str] = set()
        if self._dtype is not None:
            self._wide = halve(module, self._dtype)
            self.stored = self.stored if self.stored == "int8" else _stored_format(module)
        self._compiles = provider == "torch-compile"
        if self._compiles:
            require_compilation("provider 'torch-compile'")
        self._call = _compiled(self._module) if self._compiles else self._module
        self._seen: set[tuple[Any, ...]] = set()

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Computes the outputs for host arrays; half-precision results come back as float32."""
        result = self._compute(self._on_device(feeds))
        return [_to_host(value) for value in pytree.tree_leaves(result)]

    def prepare(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """A call that computes once on the device and waits for the result."""
        values = self._on_device(feeds)

        def step() -> None:
            self._compute(values)
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)

        return step

    def kernels(self, feeds: Mapping[str, Array]) -> tuple[Kernel, ...]:
        """The multiplying operators executed for ``feeds``, outermost only, from PyTorch's profiler."""
        values = self._on_device(feeds)
        self._compute(values)
        with quiet_profiler(), torch.autograd.profiler.profile(record_shapes=True) as profile:
            self._compute(values)
        assert profile.kineto_results is not None
        events = profile.kineto_results.events()
        return tuple(_kernel(event, self.device) for event in outermost(e for e in events if is_compute(e.name())))

    def close(self) -> None:
        """Frees the model; the session cannot be used afterwards."""
        del self._module, self._call

    def _on_device(self, feeds: Mapping[str, Array]) -> list[torch.Tensor]:
        check_feeds(f"'{self.name}'", self.inputs, feeds)
        return [self._placed(info.name, np.asarray(feeds[info.name], order="C")) for info in self.inputs]

    def _placed(self, name: str, value: Array) -> torch.Tensor:
        tensor = torch.from_numpy(value)
        halved = self._dtype is not None and tensor.is_floating_point() and name not in self._wide
        return tensor.to(self.device, self._dtype if halved else None)

    def _compute(self, values: list[torch.Tensor]) -> Any:
        call = self._call
        try:
            with torch.no_grad(), _threads(self.threads), _exact_float32(self.device), self._freezing(values):
                return call(*values)
        except Exception as error:
            raise QtoolError(
                f"'{self.name}'", f"PyTorch to compute it on {self.device}", one_line(error)[:300],
                "check the model and, to compile, that a C++ compiler is installed",
            ) from error  # fmt: skip

    @contextlib.contextmanager
    def _freezing(self, values: list[torch.Tensor]) -> Iterator[None]:
        """Inductor's weights frozen, for the first call with each set of shapes: the one that compiles."""
        shapes = tuple(tuple(value.shape) for value in values)
        if not self._compiles or shapes in self._seen:
            yield
            return
        import torch._inductor.config as inductor

        _know_integer_kernels()
        told = _told_for_a_gpu() if self.device.startswith("cuda") else {}
        with inductor.patch(freezing=True, **told), quiet_choices(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._inductor")  # on how it makes its own constants
            yield
        self._seen.add(shapes)


def open_file(
    path: Path,
    *,
    provider: str = "torch",
    threads: int = 1,
    optimize: bool = True,
    precision: str | None = None,
    device: str | None = None,
) -> TorchSession:
    """Opens a ``.pt2``; raises QtoolError for a damaged or unsafe one, or for ``optimize`` turned off."""
    if path.suffix != ".pt2":
        raise QtoolError(f"'{path}'", "a .pt2 file for torch", f"a {path.suffix or 'nameless'} file", "give the .pt2")
    if not optimize:
        raise QtoolError(f"'{path}'", "PyTorch as it is", "optimize off", "use provider torch, not torch-compile")
    from qtool.graphs.programs import as_graph
    from qtool.graphs.pt2_files import load_program

    program = load_program(path)
    graph = as_graph(program)
    if provider == "torch-compile" and _device(provider, device).startswith("cuda"):
        precision = _lowered_for_gpu(graph, precision)
    return TorchSession(
        _Flat(graph, program.call_spec.in_spec), _inputs(program), outputs=_outputs(program), provider=provider,
        device=device, threads=threads, precision=precision, name=str(path),
    )  # fmt: skip


def _lowered_for_gpu(graph: GraphModule, precision: str | None) -> str | None:
    """Has linear layers multiply integers; the precision of the rest: in a quantized graph FP16, as TensorRT has it."""
    quantized = is_quantized(graph)
    use_integer_products(graph)
    return precision or ("fp16" if quantized else None)


def _told_for_a_gpu() -> dict[str, Any]:
    """ON_A_GPU once inductor compiles in processes of its own, as it does with several cores.

    Before these are up, and without them, torch 2.11 to 2.15 fail where what follows a product can be merged with it
    and with what follows that.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() < 2:
        return {}
    AsyncCompile.wait_pool_ready()
    return ON_A_GPU


def _know_integer_kernels() -> None:
    """Has inductor find oneDNN's integer kernels: torchao has its patterns since torch 2.14."""
    from torch._inductor.fx_passes import quantization

    if not hasattr(quantization, "_register_quantization_weight_pack_pass"):
        import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401


class _Flat(torch.nn.Module):
    """A captured module called with its tensors in a row, whatever structure its own signature has."""

    def __init__(self, module: torch.nn.Module, spec: Any) -> None:
        super().__init__()
        self.module, self.spec = module, spec

    def forward(self, *values: torch.Tensor) -> Any:
        arguments, keywords = pytree.tree_unflatten(list(values), self.spec)
        return self.module(*arguments, **keywords)


def require(provider: str, device: str) -> None:
    """Raises ProviderError for a CUDA device that is not there."""
    _device(provider, device)


def _device(provider: str, asked: str | None) -> str:
    """The device asked for, CUDA where there is one if none was. Raises ProviderError for a CUDA that is not there."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked in (None, "auto"):
        return "cuda" if there else "cpu"
    assert asked is not None
    if asked.startswith("cuda") and (torch.device(asked).index or 0) >= there:
        raise ProviderError(
            f"provider '{provider}'", f"the CUDA device '{asked}'", f"{there} visible to torch {torch.__version__}",
            "use --device cpu or a device that is there, or install a CUDA build of torch and the NVIDIA driver",
        )  # fmt: skip
    return asked


def _compiled(module: torch.nn.Module) -> Callable[..., Any]:
    """The module compiled by inductor, once for each set of shapes."""
    load_inductor()
    compiled: Callable[..., Any] = torch.compile(module, dynamic=False)
    return compiled


def _stored_format(module: torch.nn.Module) -> str | None:
    """The number format of most of the weights."""
    held: Counter[str] = Counter()
    for tensor in pytree.tree_leaves([list(module.parameters()), list(module.buffers())]):
        held[str(tensor.dtype).removeprefix("torch.").replace("uint8", "int8")] += tensor.numel()
    return held.most_common(1)[0][0] if held else None


def _inputs(program: torch.export.ExportedProgram) -> tuple[TensorInfo, ...]:
    wanted = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]
    return tuple(_info(node.name, node.meta["val"]) for node in nodes)


def _outputs(program: torch.export.ExportedProgram) -> tuple[TensorInfo, ...]:
    nodes = {node.name: node for node in program.graph.nodes}
    return tuple(_info(name, nodes[name].meta["val"]) for name in program.graph_signature.user_outputs)


def _info(name: str, value: torch.Tensor) -> TensorInfo:
    shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
    return TensorInfo(name, str(value.dtype).removeprefix("torch."), shape)


def _to_host(value: torch.Tensor) -> Array:
    array: Array = to_float32(value).detach().cpu().numpy()
    return array


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """``count`` threads within an operator, and the caller's number again afterwards."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _exact_float32(device: str) -> Iterator[None]:
    """On CUDA: convolutions in float32 where it says float32 (not TF32), by the fastest algorithm there is.

    Set by torch's newer names: ``cudnn.flags`` raises where a caller has used them.
    """
    cudnn: Any = torch.backends.cudnn
    wanted = [(cudnn, "benchmark", True), (cudnn.conv, "fp32_precision", "ieee"), (cudnn.rnn, "fp32_precision", "ieee")]
    wanted = wanted if device.startswith("cuda") else []
    before = [getattr(place, name) for place, name, _ in wanted]
    try:
        for place, name, value in wanted:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(wanted, before, strict=True):
            setattr(place, name, value)


def outermost(events: Any) -> Iterator[Any]:
    """The profiler's events that are not part of another one on the same thread."""
    end: dict[Any, int] = {}
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        thread = event.start_thread_id()
        if event.start_ns() >= end.get(thread, 0):
            end[thread] = event.start_ns() + event.duration_ns()
            yield event


def _kernel(event: Any, device: str) -> Kernel:
    """An event as a kernel, in the format of its first tensor: the activation, or for addmm the bias beside it."""
    kinds = ["int8"] if "int_mm" in event.name() else [_NAMES[kind] for kind in event.dtypes() if kind in _NAMES]
    return Kernel(event.name(), event.name(), kinds[0] if kinds else "unknown", device)
