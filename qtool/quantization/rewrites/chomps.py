"""What a slice cuts off the end of a padded convolution need not be computed: the convolution pads less there.

A causal convolution is written as one that pads both ends, and a slice behind it (Bai et al., arXiv 1803.01271, call it
a chomp). With stride 1, each result that is cut off stands for one zero that need not have been there:

    conv(x; pad a, b)[c : length − d] = conv(x; pad a − c, b − d),    c ≤ a, d ≤ b

number for number. The slice would stand between the convolution and its activation, where it keeps the two from being
one unit. Uneven padding is an operator of its own in front, which belongs to the convolution again in the end (see
:mod:`qtool.quantization.rewrites.zero_pads`).

Left out on purpose: strides, other steps, and the engine ``torch.ao``, which prepares the model's own modules.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean
from qtool.graphs.operators import CONVOLUTIONS, aten, by_axis

_RANKS = {target: rank for rank, target in enumerate(CONVOLUTIONS[:3], 1)}


def drop_chomps(graph_module: GraphModule) -> int:
    """Rewrites such slices in place; returns how many."""
    dropped = [node for node in list(graph_module.graph.nodes) if node.target is aten.slice.Tensor and _drop(node)]
    if dropped:
        clean(graph_module)
    return len(dropped)


def _drop(node: Node) -> bool:
    conv = node.args[0]
    if not (isinstance(conv, Node) and conv.target in _RANKS and list(conv.users) == [node]):
        return False
    given: list[Any] = [*conv.args, *[None, 1, 0][len(conv.args) - 2 :]] if len(conv.args) < 5 else [*conv.args]
    rank = _RANKS[conv.target]
    strides, pads = (by_axis(value, rank) for value in given[3:5])
    axis = int(str(node.args[1])) % (rank + 2) - 2 if len(node.args) > 1 else -2
    cut = _cut(node, axis + 2)
    if axis < 0 or cut is None or strides[axis] != 1 or max(cut) > pads[axis]:
        return False
    ends = [pads[axis] - part for part in cut]
    even = min(ends)
    given[4] = [even if place == axis else pad for place, pad in enumerate(pads)]
    given[0] = _padded(conv, given[0], rank - 1 - axis, [end - even for end in ends])
    conv.args, conv.meta = tuple(given), {**conv.meta, "val": node.meta["val"]}
    node.replace_all_uses_with(conv)
    node.graph.erase_node(node)
    return True


def _cut(node: Node, axis: int) -> tuple[int, int] | None:
    """How many entries the slice takes off at both ends of its axis; None where it does anything else."""
    source = node.args[0]
    assert isinstance(source, Node)
    size, left = source.meta["val"].shape[axis], node.meta["val"].shape[axis]
    start, step = [*node.args[2:3], 0][0] or 0, [*node.args[4:5], 1][0]
    if step != 1 or not (isinstance(start, int) and isinstance(size, int) and isinstance(left, int)):
        return None
    first = start if start >= 0 else max(size + start, 0)
    return first, size - first - left


def _padded(conv: Node, source: Node, outer: int, ends: list[int]) -> Node:
    """``source`` padded with zeros at both ends of an axis, which has ``outer`` axes behind it; itself without any.

    Where another axis is padded for this convolution already, it is one padding of both.
    """
    if not any(ends):
        return source
    amounts = [*[0] * 2 * outer, *ends]
    value = source.meta["val"]
    sizes = list(value.shape)
    sizes[-1 - outer] += sum(ends)
    if source.target is aten.constant_pad_nd.default and list(source.users) == [conv] and source.args[2:] == (0.0,):
        source, given, _ = source.args  # type: ignore[assignment]
        amounts = [a + b for a, b in zip_longest(amounts, given, fillvalue=0)]  # type: ignore[arg-type]
    with conv.graph.inserting_before(conv):
        padded = conv.graph.call_function(aten.constant_pad_nd.default, (source, amounts, 0.0))
    padded.meta = {**conv.meta, "val": value.new_empty(sizes)}
    return padded
