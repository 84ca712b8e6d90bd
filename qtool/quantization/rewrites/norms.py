"""Batch-norm in captured graphs: folded away, turned into a convolution, or kept live while training.

In evaluation a batch-norm is ``y = x·f + h`` per channel, ``f = γ/√(σ² + ε)``, ``h = β − μ·f``. Behind a convolution
or a linear layer that nothing else reads, it folds into the weights: ``w' = w·f``, ``b' = b·f + h``. Elsewhere (before
a convolution, behind a concatenation) it is a depthwise 1×1 convolution with weights ``f`` and bias ``h``, for which
targets have an integer kernel, and whose weights are represented exactly, one channel having one.

Quantization-aware training must quantize the folded weight while statistics still move (arXiv 1712.05877,
1806.08342): ``batch_norm(conv(x, q(w·f) / f) + b)`` with ``f`` from the running variance. The papers divide the
outputs, which is the same, but takes two more passes over them and keeps them for the gradient. A channel with
``γ = 0`` would divide by zero; it is scaled by 1 there, and its output is ``β`` all the same. After training the same
fold as above is made.

A weight that several operators read gets a copy for each batch-norm that it is folded with. All sums are in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean, owner, parameter, set_parameter, store_before
from qtool.graphs.operators import CONVOLUTIONS, aten, groups_of, output_axis
from qtool.graphs.shapes import same_sizes

ANCHORS = (*CONVOLUTIONS, aten.linear.default)
FOLDED = "folded"
"""In an operator's ``meta``: the paths of the batch-norms that were folded into it."""
NORMAL = "normal"
"""Where an operator's ``meta`` keeps mean and standard deviation of its output channels, as its batch-norm says."""
GROUPED = "grouped"
"""The mark of the reshape that makes a weight of its groups (see ``stored_weights.py``)."""
LIVE = "live"
"""In the ``meta`` of what takes a live batch-norm's ``f`` out of a weight again."""
_DEPTHWISE = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}


def fold_batch_norm(graph_module: GraphModule, wanted: Callable[[Node], bool] = lambda anchor: True) -> list[Node]:
    """Folds each batch-norm that alone reads a convolution or linear into its weights; returns those operators.

    Only what is ``wanted`` of these, by default all.
    """
    copies = Copies(graph_module)
    folded = []
    for norm in _norms(graph_module):
        anchor = _from_rows(norm) or norm.args[0]
        foldable = isinstance(anchor, Node) and (anchor is not norm.args[0] or _is_foldable(anchor, norm))
        if isinstance(anchor, Node) and foldable and wanted(anchor):
            _drop_views(norm, anchor)
            fold_into(copies, anchor, norm)
            folded.append(anchor)
    clean(graph_module)
    return folded


Before = Callable[[GraphModule, Node, Tensor], Tensor]


def write_norms(graph_module: GraphModule, *, convolve: bool = True, before: Before | None = None) -> list[Node]:
    """Writes each batch-norm that has nothing to fold into as a depthwise convolution; returns those.

    ``before`` may take part of a factor into what stands there, and gives what is left.

    A batch-norm of vectors becomes a product and a sum, and every one does without ``convolve``. One that keeps no
    statistics becomes the arithmetic on the batch that it does, in float.
    """
    alone = [norm for norm in _norms(graph_module) if not _is_foldable(norm.args[0], norm)]
    made = [_convolve(graph_module, norm, convolve, before) for norm in alone]
    stored = _norms(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target is aten.batch_norm.default and node not in stored:
            _spell_out(node)
    clean(graph_module)
    return made


def _norms(graph_module: GraphModule) -> list[Node]:
    """The batch-norms whose statistics are stored; others depend on the batch that they are in."""
    nodes = [node for node in graph_module.graph.nodes if node.target is aten.batch_norm.default]
    return [node for node in nodes if isinstance(node.args[3], Node) and isinstance(node.args[4], Node)]


def _is_foldable(anchor: Any, norm: Node) -> bool:
    return (
        isinstance(anchor, Node)
        and anchor.target in ANCHORS
        and (anchor.target is not aten.linear.default or anchor.meta["val"].dim() == 2)  # else axis 1 is no output's
        and list(anchor.users) == [norm]
        and all(_is_stored(argument) for argument in anchor.args[1:3])
    )


def _from_rows(norm: Node) -> Node | None:
    """The linear layer whose batch × tokens are the rows that ``norm`` is of, where nothing else reads it.

    ``norm(y.flatten(0, 1)).reshape_as(y)`` normalises the last axis of ``y``, as folding into ``y`` does.
    """
    rows, back = norm.args[0], next(iter(norm.users), None)
    if not isinstance(rows, Node) or rows.target is not aten.flatten.using_ints or back is None:
        return None
    layer = rows.args[0]
    if not (isinstance(layer, Node) and layer.target is aten.linear.default and len(layer.users) == 1):
        return None
    alone = len(norm.users) == len(rows.users) == 1 and all(_is_stored(argument) for argument in layer.args[1:3])
    restored = same_sizes(back.meta["val"].shape, layer.meta["val"].shape)
    whole = rows.args[1:] == (0, layer.meta["val"].dim() - 2) and restored
    return layer if alone and whole and back.target is aten.reshape.default else None


def _drop_views(norm: Node, anchor: Node) -> None:
    """Lets ``norm`` read ``anchor`` itself where it reads the rows of it, to be folded into it at once."""
    rows = norm.args[0]
    if rows is anchor:
        return
    assert isinstance(rows, Node)
    back = next(iter(norm.users))
    back.replace_all_uses_with(norm)
    norm.graph.erase_node(back)
    norm.replace_input_with(rows, anchor)
    norm.graph.erase_node(rows)


def _is_stored(argument: Any) -> bool:
    return argument is None or (isinstance(argument, Node) and argument.op == "get_attr")


def coefficients(graph_module: GraphModule, norm: Node) -> tuple[Tensor, Tensor]:
    """``f`` and ``h`` of a batch-norm in float64, one of each per channel."""
    gamma, beta, mean, variance = (parameter(graph_module, argument) for argument in norm.args[1:5])
    assert mean is not None
    assert variance is not None
    epsilon = norm.args[7]
    assert isinstance(epsilon, float)
    factor = 1.0 / torch.sqrt(variance.double() + epsilon)
    if gamma is not None:
        factor = gamma.double() * factor
    shift = -mean.double() * factor
    return factor, shift if beta is None else shift + beta.double()


def _normal(graph_module: GraphModule, norm: Node) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel behind a batch-norm, on data like those of its statistics."""
    gamma, beta, mean = (parameter(graph_module, argument) for argument in norm.args[1:4])
    assert mean is not None
    return (
        torch.zeros_like(mean) if beta is None else beta.detach().clone(),
        torch.ones_like(mean) if gamma is None else gamma.detach().abs(),
    )


def scaled(weight: Tensor, factor: Tensor, anchor: Node) -> Tensor:
    """``weight`` in float64 times ``factor`` along the output channels of ``anchor``."""
    axis, groups = output_axis(anchor), groups_of(anchor)
    if axis == 1:  # transposed: inputs × outputs of one group
        per_group = factor.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
        return weight.double() * per_group.reshape(weight.shape[0], -1, *[1] * (weight.dim() - 2))
    return weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))


class Copies:
    """Where folded weights are stored: in place of the weight, or beside it where something else still reads it."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.readers = readers_of(graph_module)
        self.made: dict[tuple[str, ...], tuple[str, str]] = {}

    def store(self, anchor: Node, norm: Node, weight: Tensor, bias: Tensor) -> tuple[str, str]:
        """The names of the two tensors; the same names for the same weight under the same batch-norm."""
        sources = (_weight_node(anchor), *anchor.args[2:3], *norm.args[1:5])
        key = tuple(str(source.target) if isinstance(source, Node) else "" for source in sources)
        if key not in self.made:
            holder, _, last = key[0].rpartition(".")
            stem = holder if last.startswith("weight") else key[0]
            prefix = f"{stem}." if stem else ""
            own = self.readers.get(key[0]) == 1  # a copy made here may be read again by what is folded later
            names = (key[0], f"{prefix}bias") if own else (f"{key[0]}_folded", f"{prefix}bias_folded")
            self.made[key] = (self._free(names[0], key[0]), self._free(names[1], key[1]))
            for name, value in zip(self.made[key], (weight, bias), strict=True):
                set_parameter(self.graph_module, name, value)
        return self.made[key]

    def _free(self, name: str, own: str) -> str:
        """``name``, or that name with a number where another tensor has it."""
        taken = set(self.readers) - ({own} if self.readers.get(own) == 1 else set())
        taken |= {n for names in self.made.values() for n in names}
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        return unique


def readers_of(graph_module: GraphModule) -> dict[str, int]:
    """How many operators read each stored tensor."""
    counts: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            counts[str(node.target)] = counts.get(str(node.target), 0) + len(node.users)
    return counts


def _weight_node(anchor: Node) -> Node:
    """The stored weight of an anchor, seen through the scaling and the fake-quantizer of a live batch-norm."""
    node = anchor.args[1]
    while isinstance(node, Node) and node.op != "get_attr":
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def fold_into(copies: Copies, anchor: Node, norm: Node) -> None:
    """Folds one batch-norm into the operator that it reads, in place."""
    graph_module = copies.graph_module
    factor, shift = coefficients(graph_module, norm)
    weight = parameter(graph_module, anchor.args[1])
    bias = parameter(graph_module, anchor.args[2]) if len(anchor.args) > 2 else None
    assert weight is not None
    folded = scaled(weight, factor, anchor).to(weight.dtype)
    new_bias = shift if bias is None else shift + bias.double() * factor
    with graph_module.graph.inserting_before(anchor):
        names = copies.store(anchor, norm, folded, new_bias.to(weight.dtype))
        stored = _read(graph_module, names)
    anchor.args = (anchor.args[0], *stored, *anchor.args[3:])
    anchor.meta[NORMAL] = _normal(graph_module, norm)
    anchor.meta[FOLDED] = (*anchor.meta.get(FOLDED, ()), owner(norm))
    norm.replace_all_uses_with(anchor)
    graph_module.graph.erase_node(norm)


def _read(graph_module: GraphModule, names: Iterable[str]) -> list[Node]:
    """Nodes that read stored tensors, and know their sizes as those of the capture do."""
    nodes = [graph_module.graph.get_attr(name) for name in names]
    for node in nodes:
        node.meta["val"] = torch.empty_like(parameter(graph_module, node), device="meta")  # type: ignore[arg-type]
    return nodes


def _convolve(graph_module: GraphModule, norm: Node, convolve: bool, before: Before | None) -> Node:
    factor, shift = coefficients(graph_module, norm)
    source = norm.args[0]
    assert isinstance(source, Node)
    factor = factor if before is None else before(graph_module, source, factor)
    rank = norm.meta["val"].dim()
    stem = str(norm.args[3].target).rpartition(".")[0] or norm.name  # type: ignore[union-attr]
    convolve = convolve and rank > 2
    values = [factor.reshape(-1, *[1] * (rank - 1)), shift]
    if not convolve:
        values = [value.reshape(-1, *[1] * (rank - 2)) for value in values]
    graph = graph_module.graph
    stored = [
        store_before(graph_module, norm, f"{stem}.{name}", value.float())
        for name, value in zip(("norm_weight", "norm_bias"), values, strict=True)
    ]
    with graph.inserting_before(norm):
        if convolve:
            ones, zeros = [1] * (rank - 2), [0] * (rank - 2)
            result = graph.call_function(_DEPTHWISE[rank], (source, *stored, ones, zeros, ones, len(factor)))
        else:
            product = graph.call_function(aten.mul.Tensor, (source, stored[0]))
            product.meta = dict(norm.meta)
            result = graph.call_function(aten.add.Tensor, (product, stored[1]))
    result.meta = dict(norm.meta)
    norm.replace_all_uses_with(result)
    graph.erase_node(norm)
    return result


def _spell_out(norm: Node) -> None:
    """Writes a batch-norm over the batch's own mean and variance as these operators."""
    source, gamma, beta = norm.args[:3]
    epsilon, rank = norm.args[7], norm.meta["val"].dim()
    axes, shape = [0, *range(2, rank)], [1, -1, *[1] * (rank - 2)]

    call = functools.partial(call_before, norm)
    centred = call(aten.sub.Tensor, source, call(aten.mean.dim, source, axes, True))
    square = call(aten.mul.Tensor, centred, centred)
    variance = call(aten.add.Tensor, call(aten.mean.dim, square, axes, True), epsilon)
    result = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, variance))
    for operation, value in ((aten.mul.Tensor, gamma), (aten.add.Tensor, beta)):
        if value is not None:
            result = call(operation, result, call(aten.reshape.default, value, shape))
    norm.replace_all_uses_with(result)
    norm.graph.erase_node(norm)


def make_live(graph_module: GraphModule, units: Iterable[list[Node]]) -> None:
    """Scales the weights of each unit that starts with an operator and its batch-norm, for training.

    ``units`` are lists of nodes, anchor first. The anchor's weight becomes ``w·f / f``, of which ``w·f`` is quantized.
    """
    for nodes in units:
        if len(nodes) > 1 and nodes[1].target is aten.batch_norm.default and nodes[1] in _norms(graph_module):
            _scale(graph_module, nodes[0], nodes[1])
    graph_module.graph.lint()
    graph_module.recompile()


def _scale(graph_module: GraphModule, anchor: Node, norm: Node) -> None:
    graph, weight = graph_module.graph, anchor.args[1]
    gamma, variance, epsilon = norm.args[1], norm.args[4], norm.args[7]
    assert isinstance(weight, Node)
    assert output_axis(anchor) == 0
    with graph.inserting_before(anchor):
        deviation = graph.call_function(aten.sqrt.default, (graph.call_function(aten.add.Tensor, (variance, epsilon)),))
        factor = graph.call_function(aten.reciprocal.default, (deviation,))
        if gamma is not None:
            factor = graph.call_function(aten.mul.Tensor, (gamma, factor))
            dead = graph.call_function(aten.eq.Scalar, (factor, 0.0))
            factor = graph.call_function(aten.masked_fill.Scalar, (factor, dead, 1.0))
        shape = [-1, *[1] * (weight.meta["val"].dim() - 1)]
        tall = graph.call_function(aten.reshape.default, (factor, shape))
        folded = graph.call_function(aten.mul.Tensor, (weight, tall))
        unfolded = graph.call_function(aten.div.Tensor, (folded, tall))
    for node in (folded, unfolded):
        node.meta["val"] = weight.meta["val"]
    unfolded.meta[LIVE] = True
    bias = anchor.args[2] if len(anchor.args) > 2 else None
    anchor.args = (anchor.args[0], unfolded, bias, *anchor.args[3:])


def weight_edge(anchor: Node) -> tuple[Node, Node]:
    """The weight that is to be quantized, and the node that reads it.

    That is the anchor, or what takes ``f`` out again, or what makes a weight of its groups.
    """
    weight = anchor.args[1]
    assert isinstance(weight, Node)
    if LIVE not in weight.meta and GROUPED not in weight.meta:
        return weight, anchor
    stored = weight.args[0]
    assert isinstance(stored, Node)
    return stored, weight


def is_live(node: Node) -> bool:
    """Whether ``node`` is an anchor whose batch-norm is live behind it."""
    return node.target in ANCHORS and LIVE in weight_edge(node)[1].meta


def settle_live(graph_module: GraphModule) -> None:
    """Folds each live batch-norm, fake-quantizers kept, and every other one that folds: the end of training."""
    copies = Copies(graph_module)
    for norm in _norms(graph_module):
        anchor = norm.args[0]
        if isinstance(anchor, Node) and is_live(anchor):
            _settle(copies, norm, anchor)
    for node in list(graph_module.graph.nodes):  # the count of batches, of which only training makes use
        if node.target is aten.add_.Tensor and str(node.args[0].target).endswith("num_batches_tracked"):
            graph_module.graph.erase_node(node)
    fold_batch_norm(graph_module)


def _settle(copies: Copies, norm: Node, anchor: Node) -> None:
    graph_module = copies.graph_module
    factor, shift = coefficients(graph_module, norm)
    weight, bias = parameter(graph_module, _weight_node(anchor)), parameter(graph_module, anchor.args[2])
    assert weight is not None
    folded = scaled(weight, factor, anchor).to(weight.dtype)
    new_bias = shift if bias is None else shift + bias.double() * factor
    names = copies.store(anchor, norm, folded, new_bias.to(weight.dtype))
    quantizer, _ = weight_edge(anchor)
    with graph_module.graph.inserting_before(quantizer):
        stored = _read(graph_module, names)
    if quantizer.op == "call_module":
        quantizer.update_arg(0, stored[0])
    anchor.update_arg(1, quantizer if quantizer.op == "call_module" else stored[0])
    anchor.update_arg(2, stored[1])
    norm.replace_all_uses_with(anchor)
    graph_module.graph.erase_node(norm)
