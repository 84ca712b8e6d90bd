"""Sums over an axis of a few parts as additions, which runtimes have in integers.

Branches are often stacked, weighed and summed over the axis in which they were stacked (SKNet, ResNeSt, EfficientDet):

    sum(stack(a, b) · w, axis) = a · w_0 + b · w_1

So are groups of channels that a reshape sets apart, and means. Left as they are: sums over more than four places, each
of which costs an operator and a rounding, and of what no convolution gave or was not stacked.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import aten
from qtool.quantization.rewrites.maxima import is_convolved

MOST = 4
_SUMS = (aten.sum.dim_IntList, aten.mean.dim)
_WEIGHED = (aten.mul.Tensor, aten.div.Tensor)


def write_axis_sums(graph_module: GraphModule) -> int:
    """Writes such sums as additions, in place; returns how many."""
    written = 0
    for node in list(graph_module.graph.nodes):
        if node.target in _SUMS and (found := _axis(node)) is not None:
            axis, count = found
            parts = [_part(node, node.args[0], axis, index) for index in range(count)]
            if node.target is aten.mean.dim:  # before the sum, where layers take the factor
                parts = [call_before(node, aten.div.Tensor, part, count) for part in parts]
            total = parts[0]
            for part in parts[1:]:
                total = call_before(node, aten.add.Tensor, total, part)
            node.replace_all_uses_with(total)
            written += 1
    if written:
        clean(graph_module)
    return written


def _axis(node: Node) -> tuple[int, int] | None:
    """The axis of a sum over a few parts, and their number; None for another sum."""
    if len(node.args) != 2 or node.kwargs:
        return None
    arguments: Any = node.args
    source, axes = arguments
    value = source.meta["val"]
    if not isinstance(axes, list) or len(axes) != 1 or not value.is_floating_point():
        return None
    axis = axes[0] % value.dim()
    count = value.shape[axis]
    if not isinstance(count, int) or not 2 <= count <= MOST:
        return None
    while source.target in _WEIGHED and len(source.users) == 1 and isinstance(source.args[0], Node):
        source = source.args[0]
    if source.target is aten.reshape.default and axis == 1 and value.dim() > 3:  # groups of channels
        return (axis, count) if is_convolved(source.args[0]) else None
    return (axis, count) if _is_stacked(source, axis) else None


def _is_stacked(node: Node, axis: int) -> bool:
    """Whether it is made of parts that have one place along that axis."""
    if node.target is not aten.cat.default:
        return False
    arguments: Any = node.args
    parts, own = arguments[0], arguments[1] if len(arguments) > 1 else 0
    return own % node.meta["val"].dim() == axis and all(part.meta["val"].shape[axis] == 1 for part in parts)


def _part(before: Node, value: Any, axis: int, index: int) -> Any:
    """What is at one place of an axis, without that axis: of products and stacks that of what they are made of."""
    if not isinstance(value, Node) or axis < 0:  # a number, or what has no such axis and is the same for all
        return value
    arguments: Any = value.args
    rank, size = value.meta["val"].dim(), value.meta["val"].shape[axis]
    if value.target in _WEIGHED and len(value.users) == 1:
        ranks = [read.meta["val"].dim() if isinstance(read, Node) else 0 for read in arguments]
        parts = [_part(before, read, axis - rank + own, index) for read, own in zip(arguments, ranks, strict=True)]
        return call_before(before, value.target, *parts)
    if _is_stacked(value, axis):
        part = arguments[0][index]
        if part.target is aten.unsqueeze.default and part.args[1] % rank == axis:
            return part.args[0]
        return call_before(before, aten.squeeze.dim, part, axis)
    return call_before(before, aten.select.int, value, axis, 0 if size == 1 else index)
