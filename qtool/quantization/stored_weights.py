"""A layer's integers in a quantized graph and their scales: one for each output, or for each group of its inputs.

Four bits are few for all inputs of an output; with a scale for every ``g`` of them,

    W[n, k] ≈ s[n, ⌊k / g⌋] · q[n, k],

the largest of a group decides its step and no other (arXiv 2210.17323 groups so for GPTQ; runtimes multiply such
weights as they are stored). A grouped weight of N × K is N·K/g rows of g values, each a channel with a scale of its
own, and a reshape makes N × K of the rows: observers, fake-quantizers and files know channels already.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.graphs.edits import drop_unused, parameter, set_parameter
from qtool.graphs.operators import aten, output_axis
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.quantizers.pair_sums import PAIRED, fitted
from qtool.quantization.rewrites.norms import GROUPED


def group_weights(graph_module: GraphModule, placement: Placement, size: int) -> tuple[str, ...]:
    """Stores the weights of a placement's block products as rows of ``size``, in place; returns notes on those left."""
    readers = Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr" for _ in n.users)
    blocks, wanted = [p for p in placement.placed if p.unit.block], placement.target.weight
    finer = [p.unit.name for p in blocks if placement.weight_format(p) != wanted]
    left = [p.unit.name for p in blocks if p.unit.name not in finer and not _group(graph_module, p, size, readers)]
    drop_unused(graph_module)
    graph_module.recompile()
    if not blocks:
        return ("group-size: no linear layer multiplies its weights as they are stored",)
    reasons = (f"groups of {size} do not fit", left), (f"weights have more than {wanted.bits} bits", finer)
    return tuple(
        f"group-size: one scale for each output where {reason}: {', '.join(names[:4])}{' …' if names[4:] else ''}"
        for reason, names in reasons if names
    )  # fmt: skip


def _group(graph_module: GraphModule, placed: Placed, size: int, readers: Counter[str]) -> bool:
    node = placed.anchor.args[1]
    weight = parameter(graph_module, node)
    assert isinstance(node, Node)
    batch_norm = any(other.target is aten.batch_norm.default for other in placed.nodes)  # trains behind whole outputs
    if weight is None or weight.shape[1] % size or batch_norm or readers[str(node.target)] > 1:
        return False
    path = f"{placed.anchor.name}_groups"
    set_parameter(graph_module, path, weight.reshape(-1, size), like=str(node.target))
    with graph_module.graph.inserting_before(placed.anchor):
        rows = graph_module.graph.get_attr(path)
        whole = graph_module.graph.call_function(aten.reshape.default, (rows, list(weight.shape)))
    rows.meta["val"], whole.meta = weight.reshape(-1, size), {"val": weight, GROUPED: size}
    placed.anchor.update_arg(1, whole)
    placed.unit = dataclasses.replace(placed.unit, block=size)
    return True


def dequantize_of(layer: Node) -> Node:
    """What dequantizes the integers of a layer, in rows of groups or not."""
    weight = layer.args[1]
    assert isinstance(weight, Node)
    source = weight.args[0] if weight.target is aten.reshape.default else weight
    assert isinstance(source, Node)
    assert source.target is quantized.dequantize_per_channel.default
    return source


def is_grouped(layer: Node) -> bool:
    """Whether a layer's inputs share scales in groups."""
    return dequantize_of(layer) is not layer.args[1]


def integers_of(graph_module: GraphModule, layer: Node) -> Tensor:
    """The integers of a layer, shaped as its weight."""
    integers = parameter(graph_module, dequantize_of(layer).args[0])
    assert integers is not None
    return integers.reshape(_shape(layer)) if is_grouped(layer) else integers


def ends_of(layer: Node) -> tuple[int, int]:
    """The least and the greatest integer that a layer's format has."""
    qmin, qmax = (int(str(end)) for end in dequantize_of(layer).args[4:6])
    return qmin, qmax


def scales_of(graph_module: GraphModule, layer: Node) -> Tensor:
    """The scales of a layer's integers, float32: one for each of these where they are grouped, else one per output."""
    stored = dequantize_of(layer)
    scales, integers = parameter(graph_module, stored.args[1]), parameter(graph_module, stored.args[0])
    assert scales is not None
    assert integers is not None
    if is_grouped(layer):
        return scales[:, None].expand(integers.shape).reshape(_shape(layer))
    return scales.reshape([-1 if axis == output_axis(layer) else 1 for axis in range(integers.dim())])


def store_integers(graph_module: GraphModule, layer: Node, made: Tensor) -> None:
    """Gives a layer other integers, of any shape with as many, brought to fit where its pairs have to."""
    stored = dequantize_of(layer).args[0]
    integers = parameter(graph_module, stored)
    assert integers is not None
    assert isinstance(stored, Node)
    made = fitted(made.reshape(integers.shape), layer.meta.get(PAIRED))
    set_parameter(graph_module, str(stored.target), made.to(integers.dtype))


def _shape(layer: Node) -> list[int]:
    weight = layer.args[1]
    assert isinstance(weight, Node)
    assert isinstance(weight.args[1], list | tuple)
    return [int(str(size)) for size in weight.args[1]]
