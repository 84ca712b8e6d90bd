"""Streams: the tensors of a graph that must share one scaling of their channels, with who makes and who reads them.

If a convolution's output channels are multiplied by ``s`` and the weights that read them divided by ``s``, a network
computes the same, as long as everything between is indifferent to a positive factor: ReLU, pooling, padding with
zeros, a sum whose operands carry the same factor. A *stream* is the largest set of values joined in this way: one
tensor between two convolutions, or the whole residual path of a stage with all its blocks. ReLU6 clips at a fixed
value, so a channel may be scaled only as far as it was never seen to reach it.

A stream that anything else reads or makes is *blocked*, with the reason: a graph's input or output, a concatenation, a
product, an activation with a curve, a weight that several layers share. Where channels only change places, products and
curves let them by as well, and longer streams come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import padding_of
from qtool.graphs.edits import parameter
from qtool.graphs.operators import ADAPTIVE_POOLS, AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, aten, groups_of
from qtool.graphs.shapes import same_sizes
from qtool.quantization.algorithms.bias import channel_axis
from qtool.quantization.targets.base import POINTWISE

ANCHORS = (*CONVOLUTIONS[:3], aten.linear.default)
_HOMOGENEOUS = (aten.relu.default, aten.leaky_relu.default, aten.dropout.default, aten.clone.default)
_POOLS = (*MAX_POOLS, *AVERAGE_POOLS, *ADAPTIVE_POOLS, aten.mean.dim)
RESHAPES = (
    aten.flatten.using_ints, aten.reshape.default, aten.squeeze.dims, aten.squeeze.dim,
)  # fmt: skip
_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_SILENT = (aten.sym_size.int,)


@dataclass(eq=False)
class Stream:
    """Values with common channels: ``producers`` write them, ``consumers`` read them, ``caps`` clip them from above.

    ``axis`` counts the channels of each value, from the last one where it is negative.
    """

    num_channels: int
    axis: int
    values: list[Node] = field(default_factory=list)
    producers: list[Node] = field(default_factory=list)
    consumers: list[Node] = field(default_factory=list)
    caps: dict[Node, float] = field(default_factory=dict)
    blocked: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The module path of the first layer that writes the stream."""
        first = self.producers[0]
        return str(first.meta.get("owner") or first.name)

    def absorb(self, other: Stream) -> None:
        """Makes this stream the union of both."""
        if (other.num_channels, other.axis) != (self.num_channels, self.axis):
            self.blocked.append("a sum broadcasts channels")
        for name in ("values", "producers", "consumers", "blocked"):
            getattr(self, name).extend(getattr(other, name))
        self.caps.update(other.caps)


def find_streams(graph: GraphModule, *, scaled: bool = True) -> list[Stream]:
    """The streams of a captured, batch-norm-folded graph, in the order of their first producers.

    Without ``scaled`` channels only change places.
    """
    finder = _Finder(scaled)
    for node in graph.graph.nodes:
        finder.visit(node)
    streams = list(dict.fromkeys(finder.stream.values()))
    for stream in streams:
        stream.producers.sort(key=list(graph.graph.nodes).index)
    return [stream for stream in streams if stream.producers]


class _Finder:
    def __init__(self, scaled: bool) -> None:
        self.scaled = scaled
        self.stream: dict[Node, Stream] = {}

    def visit(self, node: Node) -> None:
        """Puts the value of ``node`` into a stream, or blocks the streams that it reads."""
        if node.op == "get_attr" or node.target in _SILENT:
            return
        if node.target in ANCHORS:
            self._anchor(node)
        elif self._is_between_channels(node):
            self._sum(node)
        elif (stream := self.stream.get(_first(node))) is not None and self._lets_by(node, stream.axis):
            self._join(node, stream)
            if (cap := _cap(node)) is not None:
                self.stream[node].caps[node] = cap
        else:
            self._block(node, node.all_input_nodes)

    def _is_between_channels(self, node: Node) -> bool:
        """Whether an operator computes with the same channel of two values at a time."""
        if self.scaled:
            return node.target is aten.add.Tensor and _is_plain_sum(node)
        return node.target in _BINARY and len(node.all_input_nodes) == 2

    def _lets_by(self, node: Node, axis: int) -> bool:
        if _passes(node, axis):
            return True
        return not self.scaled and (_is_pointwise(node) or (axis == -1 and _keeps_last(node)))

    def _block(self, node: Node, operands: list[Node]) -> None:
        kind = "the graph's output" if node.op == "output" else str(node.target).removeprefix("aten.").split(".")[0]
        for operand in operands:
            if operand in self.stream:
                self.stream[operand].blocked.append(f"{kind} reads it")

    def _join(self, node: Node, stream: Stream) -> None:
        stream.values.append(node)
        self.stream[node] = stream

    def _anchor(self, node: Node) -> None:
        source, *stored = node.args[0], *node.args[1:3]
        axis = channel_axis(node)
        if self.scaled or axis >= 0:  # else counted from the last, and joined rows of tokens or not
            axis %= node.meta["val"].dim()
        size = node.meta["val"].shape[axis]
        if not isinstance(size, int):  # open: to take it for a number would fix it for the whole graph
            self._block(node, node.all_input_nodes)
            return
        made = Stream(size, axis)
        made.producers.append(node)
        self._join(node, made)
        read = self.stream.get(source)  # type: ignore[arg-type]
        if read is not None:
            read.consumers.append(node)
        for stream in (made, read):
            if stream is not None and (reason := unfit(stored)):
                stream.blocked.append(reason)
        if read is not None and _is_misread(node, read):
            read.blocked.append("channels are not what a layer mixes")

    def _sum(self, node: Node) -> None:
        left, right = node.args[0], node.args[1]
        known = [self.stream[o] for o in (left, right) if o in self.stream]  # type: ignore[index]
        if len(known) < 2:
            self._block(node, [o for o in (left, right) if isinstance(o, Node)])
            return
        first, second = known
        if first is not second:
            first.absorb(second)
            for value in second.values:
                self.stream[value] = first
        if not (_same_shape(left, right) if self.scaled else _same_channels(left, right, first.axis)):
            first.blocked.append("a sum broadcasts")
        self._join(node, first)


def _first(node: Node) -> Any:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def _is_misread(node: Node, stream: Stream) -> bool:
    """Whether the axis that a layer mixes is another than the stream's channels."""
    source = node.args[0]
    assert isinstance(source, Node)
    shape = source.meta["val"].shape
    mixed = channel_axis(node) % len(shape)
    return mixed != stream.axis % len(shape) or not same_sizes(shape[mixed : mixed + 1], [stream.num_channels])


def unfit(stored: list[Any]) -> str:
    """Why a layer's weights cannot be rescaled; empty when they can."""
    if any(value is not None and not (isinstance(value, Node) and value.op == "get_attr") for value in stored):
        return "a weight is computed, not stored"
    if any(value is not None and _readers(value) > 1 for value in stored):
        return "a weight is shared by several layers"
    return ""


def _readers(stored: Node) -> int:
    nodes = [n for n in stored.graph.nodes if n.op == "get_attr" and n.target == stored.target]
    return sum(len(n.users) for n in nodes)


def _is_plain_sum(node: Node) -> bool:
    return all(isinstance(a, Node) for a in node.args[:2]) and bool(node.kwargs.get("alpha", 1) == 1)


def _is_pointwise(node: Node) -> bool:
    """Whether an operator computes the same of every number of one value."""
    return node.target in POINTWISE or (node.target in _BINARY and len(node.all_input_nodes) == 1)


def _same_channels(left: Any, right: Any, axis: int) -> bool:
    shapes = [side.meta["val"].shape for side in (left, right)]
    return len(shapes[0]) == len(shapes[1]) and same_sizes(*([shape[axis]] for shape in shapes))


def _keeps_last(node: Node) -> bool:
    """Whether a reshape leaves the last axis as it is."""
    source = _first(node)
    if node.target not in RESHAPES or source is None:
        return False
    before, after = source.meta["val"].shape, node.meta["val"].shape
    return len(after) > 0 and same_sizes(before[-1:], after[-1:])


def _same_shape(left: Any, right: Any) -> bool:
    values = [side.meta.get("val") for side in (left, right)]  # a stored constant has none
    return all(value is not None for value in values) and same_sizes(values[0].shape[1:], values[1].shape[1:])


def _passes(node: Node, axis: int) -> bool:
    """Whether channels, which ``axis`` counts, leave ``node`` as they came, a positive factor of each included."""
    if node.target in _HOMOGENEOUS or _cap(node) is not None:
        return True
    if node.target is aten.clamp_min.default:
        return node.args[1] in (0, 0.0)
    source = _first(node)
    if axis != 1 or source is None:  # what else passes channels works on the axes behind the second
        return False
    if any(not isinstance(n.meta.get("val"), Tensor) for n in (source, node)):
        return False
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if pads_zeros(node):
        return True
    kept = same_sizes(before[1:2], after[1:2])
    if node.target in _POOLS:
        plain = len(node.args) < 7 or node.args[6] is None  # a pool with a divisor of its own keeps no constant
        return plain and len(before) > 2 and len(after) >= 2 and kept and _keeps_channels(node)
    return node.target in RESHAPES and len(after) == 2 and kept and same_sizes(before[2:], [1] * len(before[2:]))


def pads_zeros(node: Node) -> bool:
    """Whether an operator does nothing but to put zeros around each image: ``pad(x, sizes, mode, value)``."""
    amounts = padding_of(node)
    return amounts is not None and len(amounts) <= 2 * (node.meta["val"].dim() - 2)


def _keeps_channels(node: Node) -> bool:
    """Whether a pooling is over other axes than the first two."""
    dims = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if node.target is aten.mean.dim:
        return all(int(axis) % dims >= 2 for axis in node.args[1])  # type: ignore[union-attr, arg-type]
    kinds = (MAX_POOLS, AVERAGE_POOLS, ADAPTIVE_POOLS)  # each has the pooling of one axis, of two and of three
    return bool(dims - 3 == next(kind.index(node.target) for kind in kinds if node.target in kind))


def _cap(node: Node) -> float | None:
    """The upper clip of an activation that clips at zero and above; None for any other operator."""
    if node.target is aten.relu6.default:
        return 6.0
    if node.target in (aten.hardtanh.default, aten.clamp.default) and len(node.args) > 2:
        low, high = node.args[1], node.args[2]
        if low in (0, 0.0) and isinstance(high, int | float) and high > 0:
            return float(high)
    return None


def per_input(weight: Tensor, node: Node, values: Tensor) -> Tensor:
    """``values`` of a layer's input channels, shaped as its weight: outputs × inputs of a group × 1…"""
    table = values.reshape(groups_of(node), 1, -1).expand(-1, weight.shape[0] // groups_of(node), -1)
    return table.reshape(weight.shape[0], weight.shape[1], *[1] * (weight.dim() - 2))


def towards_inputs(weight: Tensor, node: Node, gains: Tensor) -> Tensor:
    """Σ over outputs and taps of gain × weight², for each input channel."""
    squares = weight.square().flatten(2).sum(2) if weight.dim() > 2 else weight.square()
    return (squares * gains[:, None]).reshape(groups_of(node), -1, weight.shape[1]).sum(1).flatten()


def keeps_channels(node: Node, axis: int) -> bool:
    """Whether channels leave an operator as they came, up to positive factors: activation, pooling, sum of equals.

    ``axis`` counts the channels.
    """
    plain = node.target is aten.add.Tensor and _is_plain_sum(node)
    return _same_shape(*node.args[:2]) if plain else _passes(node, axis)


def input_sums(graph: GraphModule, node: Node, values: Tensor) -> Tensor:
    """What a layer without its bias and padding makes of constant input channels ``values``: one number per output."""
    weight = parameter(graph, node.args[1])
    assert weight is not None
    return (weight.to(values.dtype) * per_input(weight, node, values)).flatten(1).sum(1)
