"""The second engine: torch.ao's FX graph mode, giving the same quantized form as the default one.

``prepare_fx`` traces the model symbolically, fuses conv-bn-relu into modules of ``torch.ao.nn.intrinsic`` and puts
observers where a ``BackendConfig`` says; ``_convert_to_reference_decomposed_fx`` turns them into quantize and
dequantize operators. Three things make the result the one form:

- the ``BackendConfig`` is generated from the target's patterns (``targets/``), its observers are qtool's own;
- the placement, made on the captured float graph, decides: observers that it does not ask for are taken
  out, and the converted graph, captured again, is matched with the float graph operator by operator
  (``align.py``), which names the units and proves that every quantizer is where the placement wants it;
- batch-norm is folded in the order of operations of ``norms.py``, so that weights are equal bit for bit.

Quantization-aware training goes through ``torch.ao.nn.intrinsic.qat`` modules with live batch-norm.

torch has announced the removal of this API: all that knows it is here and in the eager door, and importing them
without it raises QtoolError. Left out on purpose: what FX cannot trace; ``pt2e`` does it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qtool.errors import QtoolError, one_line
from qtool.graphs.edits import owner, remove_identities
from qtool.graphs.operators import aten
from qtool.graphs.programs import arguments
from qtool.graphs.shapes import open_axes
from qtool.quantization.capturing.capture import capture, set_modes, user_line
from qtool.quantization.engines.align import Misaligned, align, check_quantizers, label_units
from qtool.quantization.engines.module_norms import convolve_norms, folded
from qtool.quantization.engines.spellings import RESPELT, WRITTEN, refuse_parts
from qtool.quantization.integers import drop_requantization
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.prepared import Prepared
from qtool.quantization.rewrites.constants import fold_quantized
from qtool.quantization.rewrites.matrices import flatten_quantized
from qtool.quantization.targets import Pattern, Target
from qtool.quantization.torchao_api import modules_forgotten
from qtool.system.quiet import quiet_torch_ao

try:
    import torch.ao.nn.intrinsic as nni
    import torch.ao.nn.intrinsic.qat as nniqat
    import torch.ao.nn.qat as nnqat
    import torch.ao.nn.quantized.reference as nnqr
    from torch.ao.quantization import QConfigMapping
    from torch.ao.quantization.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType
    from torch.ao.quantization.fx.tracer import QuantizationTracer
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx, prepare_qat_fx

    from qtool.quantization.engines.torch_ao_observers import STORAGE, TRANSPARENT, keep_wanted, qconfig
except ImportError as missing:
    raise QtoolError(
        "engine 'torch.ao'", "a torch with torch.ao's FX graph mode", f"torch {torch.__version__} ({missing})",
        "use --engine pt2e",
    ) from missing  # fmt: skip


# Other activations are absorbed by their bounds, which a pattern cannot see; the placement takes observers out there.
_ALWAYS_FUSED = (aten.relu.default, aten.relu6.default)


# The BackendConfig, generated from the target's patterns.


@dataclass(frozen=True)
class _Weighted:
    """A module with a weight, its functional form, and what it fuses to in ``torch.ao.nn.intrinsic``."""

    root: Any
    function: Any
    norm: Any
    with_relu: Any
    with_norm: Any
    with_both: Any = None

    def trained(self) -> dict[Any, Any]:
        """The module that trains in place of each form."""
        fused = [form for form in (self.with_relu, self.with_norm, self.with_both) if form is not None]
        return {self.root: getattr(nnqat, self.root.__name__)} | {f: getattr(nniqat, f.__name__) for f in fused}

    def fusions(self, pattern: Pattern, train: bool) -> dict[tuple[Any, ...], Any]:
        """What each sequence of modules becomes; without training, batch-norm is folded and leaves no module."""
        found: dict[tuple[Any, ...], Any] = {(self.root, relu): self.with_relu for relu in _RELUS}
        if pattern.batch_norm:
            found[self.root, self.norm] = self.with_norm if train else self.root
        if pattern.batch_norm and self.with_both is not None:
            found |= {(self.root, self.norm, relu): self.with_both if train else self.with_relu for relu in _RELUS}
        return found


_RELUS = (nn.ReLU, F.relu)
_MODULES = (
    _Weighted(nn.Conv1d, F.conv1d, nn.BatchNorm1d, nni.ConvReLU1d, nni.ConvBn1d, nni.ConvBnReLU1d),
    _Weighted(nn.Conv2d, F.conv2d, nn.BatchNorm2d, nni.ConvReLU2d, nni.ConvBn2d, nni.ConvBnReLU2d),
    _Weighted(nn.Conv3d, F.conv3d, nn.BatchNorm3d, nni.ConvReLU3d, nni.ConvBn3d, nni.ConvBnReLU3d),
    _Weighted(nn.Linear, F.linear, nn.BatchNorm1d, nni.LinearReLU, nni.LinearBn1d),
)


def backend_config(target: Target, *, train: bool) -> BackendConfig:
    """What the target fuses, in torch.ao's terms. ``train`` keeps batch-norm live in the fused modules."""
    configs: list[BackendPatternConfig] = []
    for pattern in target.patterns:
        written = [w for anchor in pattern.anchors for w in WRITTEN.get(anchor, ())]
        made = [] if pattern.weighted else _with_activations(written, pattern)
        for module in _MODULES:
            if pattern.weighted and module.root in written:
                made += [*_forms(module, pattern, train), *_functional(module.function, pattern)]
        configs += [_observed(config, target, pattern) for config in made]
    return BackendConfig(target.name).set_backend_pattern_configs(configs)


def _observed(config: BackendPatternConfig, target: Target, pattern: Pattern) -> BackendPatternConfig:
    activation, weight = STORAGE[target.activation.dtype], STORAGE[target.weight.dtype]
    dtypes = (activation, activation, weight, torch.float) if pattern.weighted else (activation, activation)
    kind = "OUTPUT_SHARE_OBSERVER_WITH_INPUT" if pattern.shares else "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT"
    return config.set_observation_type(ObservationType[kind]).set_dtype_configs([DTypeConfig(*dtypes)])


def _with_activations(heads: list[Any], pattern: Pattern) -> list[BackendPatternConfig]:
    """A config for each head alone, and one for it before each activation that is always absorbed."""
    tails = [w for activation in pattern.activations if activation in _ALWAYS_FUSED for w in WRITTEN[activation]]
    pairs = [(head, tail) for head in heads for tail in dict.fromkeys(tails)]
    return [BackendPatternConfig(p) for p in (*heads, *pairs)]


def _functional(function: Any, pattern: Pattern) -> list[BackendPatternConfig]:
    made = _with_activations([function], pattern)
    return [config._set_input_type_to_index({"weight": 1, "bias": 2}) for config in made]


def _forms(module: _Weighted, pattern: Pattern, train: bool) -> list[BackendPatternConfig]:
    """Configs of one weighted module: the sequences that fuse, and each form of it, which is observed as a whole."""
    trained, fusions = module.trained(), module.fusions(pattern, train)
    forms = [c for c in _with_activations([*trained, *trained.values()], pattern) if c.pattern not in fusions]
    for config in forms:
        config.set_root_module(module.root)
        config.set_reference_quantized_module(getattr(nnqr, module.root.__name__))
        if config.pattern in trained:
            config.set_qat_module(trained[config.pattern])
    for sequence, fused in fusions.items():
        forms.append(BackendPatternConfig(sequence).set_fuser_method(_fuser(fused, train)))
        if fused is not module.root:
            forms[-1].set_fused_module(fused)
    return forms


def _fuser(fused: Any, train: bool) -> Callable[..., nn.Module]:
    """Makes the fused module of matched modules: with live batch-norm for training, else with it folded."""

    def fuse(_is_qat: bool, root: nn.Module, *rest: Any) -> nn.Module:
        norm = rest[0] if rest and isinstance(rest[0], nn.modules.batchnorm._BatchNorm) else None
        parts: list[nn.Module] = [root if norm is None or train else folded(root, norm)]
        if norm is not None and train:
            parts.append(norm)
        if len(rest) > (norm is not None):
            parts.append(nn.ReLU())
        made = parts[0] if len(parts) == 1 else fused(*parts)
        return made.train(root.training)

    return fuse


# Preparing: trace, fuse, observe, and take out what the placement does not ask for.


def prepare(
    model: nn.Module,
    placement: Placement,
    example: Any,
    *,
    train: bool = False,
    detailed: bool = False,
    weight_ranges: str = "minmax",
) -> Prepared:
    """Prepares a copy of ``model``. ``placement`` is made on its captured, folded float graph.

    Raises QtoolError naming the user's line when FX cannot trace the model.
    """
    target = placement.target
    with _blaming(model):
        ours = copy.deepcopy(model)
        if train:
            _write_factors(ours)
        convolve_norms(ours, placement.graph_module)
        traced, nodes = _trace(ours, train)
    units = _link(traced, nodes, placement)
    config = backend_config(target, train=train)
    mapping = QConfigMapping().set_global(qconfig(target, train=train, detailed=detailed, weight_ranges=weight_ranges))
    for node, _ in nodes:
        if node.op == "call_module" and node.name in units and units[node.name].pattern is None:
            mapping.set_module_name(str(node.target), None)
    inputs, _ = arguments(example)
    with quiet_torch_ao(), modules_forgotten(), _blaming(model):
        graph = (prepare_qat_fx if train else prepare_fx)(traced, mapping, inputs, backend_config=config)
    observers = keep_wanted(graph, placement, units)
    return Prepared(graph, placement, observers, lambda: _convert(graph, placement, config, example), switch)


def _write_factors(model: nn.Module) -> None:
    """Gives batch-norms that have none a weight and a bias, which are not trained: torch.ao's layers read them."""
    for module in model.modules():
        mean = module.running_mean if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
        if mean is not None and not module.affine:
            module.weight = nn.Parameter(torch.ones_like(mean), requires_grad=False)
            module.bias = nn.Parameter(torch.zeros_like(mean), requires_grad=False)


@contextmanager
def _blaming(model: nn.Module) -> Iterator[None]:
    """Turns what torch.ao raises into one line with the way out."""
    try:
        yield
    except Exception as error:
        raise QtoolError(
            f"model '{type(model).__name__}'", "a model that torch.ao's FX graph mode can trace",
            one_line(f"{type(error).__name__}: {error}")[:300],
            f"{user_line(error)}use --engine pt2e, which captures with torch.export",
        ) from error  # fmt: skip


def _trace(model: nn.Module, train: bool) -> tuple[GraphModule, list[tuple[Node, str]]]:
    """The model as an FX graph without identities, and each node with the path of its module.

    torch.ao traces what it is given once more; the nodes are those of that second trace, whose names it keeps.
    """
    tracer = QuantizationTracer([], [])
    set_modes(model, train=train)
    graph = GraphModule(model, tracer.trace(model)).train(train)
    refuse_parts(graph.graph)
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if _is_identity(node, modules, train):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    paths = [
        str(n.target) if n.op == "call_module" else str(tracer.node_name_to_scope.get(n.name, ("",))[0])
        for n in graph.graph.nodes
    ]
    return graph, list(zip(QuantizationTracer([], []).trace(graph).nodes, paths, strict=True))


def _is_identity(node: Node, modules: Mapping[str, nn.Module], train: bool) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, nn.Identity) or (not train and isinstance(module, nn.modules.dropout._DropoutNd))
    return not train and node.op == "call_function" and node.target in TRANSPARENT


def _link(traced: GraphModule, nodes: list[tuple[Node, str]], placement: Placement) -> dict[str, Placed]:
    """The placed unit that each traced node, by name, is part of: same module, same kind of operator, in order."""
    modules = dict(traced.named_modules())
    waiting: dict[str, list[tuple[Node, Placed]]] = {}
    for placed in placement.placed:
        for captured in placed.nodes:
            waiting.setdefault(owner(captured), []).append((captured, placed))
    units = {}
    for node, path in nodes:
        written = type(modules[str(node.target)]) if node.op == "call_module" else node.target
        for pair in waiting.get(path, ()) if node.op.startswith("call") else ():
            if written in (*WRITTEN.get(pair[0].target, ()), *RESPELT.get(pair[0].target, ())):
                units[node.name] = pair[1]
                waiting[path].remove(pair)
                break
    return units


# Converting.


def _convert(prepared: GraphModule, placement: Placement, config: BackendConfig, example: Any) -> GraphModule:
    """The quantized graph, its units named by the placement. Raises QtoolError where torch.ao placed otherwise."""
    with quiet_torch_ao(), modules_forgotten():
        reference = _convert_to_reference_decomposed_fx(prepared, backend_config=config)
    graph = capture(reference, example, axes=tuple(open_axes(placement.graph_module)))
    remove_identities(graph)
    fold_quantized(graph)
    drop_requantization(graph)
    try:
        pairs = align(placement.graph_module, graph)
        label_units(placement, pairs)
        check_quantizers(placement, pairs)
    except Misaligned as difference:
        raise QtoolError(
            "engine 'torch.ao'", "the operators and quantizers of the placement", str(difference), "use --engine pt2e"
        ) from difference
    if placement.target.flat_linears:
        flatten_quantized(graph)
    return graph


def switch(graph: GraphModule, *, batch_norm: bool, dropout: bool) -> None:
    """Sets batch-norm and dropout of a prepared model to training or evaluation, each on its own."""
    graph.train(dropout)
    for module in graph.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):  # instance norm's statistics stay the trained ones
            module.training = batch_norm and isinstance(module, nn.modules.batchnorm._BatchNorm)
    changed = False
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in TRANSPARENT:
            changed |= node.kwargs.get("training", True) is not dropout
            node.update_kwarg("training", dropout)
    if changed:
        graph.recompile()
