"""Which channels of a file's images are the same: what may be added to one of them has to be added to all.

Channels run from the convolutions that make them, through whatever works channel by channel (depthwise convolutions,
activations, pools, gates, sums) and concatenations, to the convolutions that read them. Two channels are one where an
operator reads them together. Channels that stand side by side wherever they are make a *block*, so that each tensor is
a row of blocks; those that stand in one row, of any tensor, are neighbours. A block that meets anything else (an
output, a Reshape, a constant for each channel) has to stay as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.parts import shape_of, zeros_of

CHANNELWISE = (
    "QuantizeLinear", "DequantizeLinear", "Relu", "LeakyRelu", "Elu", "Clip", "HardSigmoid", "HardSwish", "Sigmoid",
    "Tanh", "Identity", "Add", "Sub", "Mul", "AveragePool", "MaxPool", "GlobalAveragePool",
)  # fmt: skip
PLAIN = (ir.DataType.INT8, ir.DataType.INT32, ir.DataType.FLOAT)
"""Types of constants beside which a kernel works in integers, or in float by choice: four bits it would widen first."""

Numbers = npt.NDArray[np.int64]


class Channels:
    """The blocks of a file's tensors.

    ``rows`` has the blocks of each tensor, ``sizes`` how many channels a block has, ``fixed`` the blocks that have to
    stay, and ``readers`` the operators that read or give such tensors.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._of: dict[ir.Value, Numbers] = {}
        self._count = 0
        self._ties: list[tuple[Numbers, Numbers]] = []
        self._fixed: list[Numbers] = []
        self.readers: list[ir.Node] = []
        for value in graph.inputs:
            self._fix(value)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            read = [value for value in node.inputs if value is not None and not is_single(value)]
            if node.graph is not graph:
                self._fix(*read)
            elif not all(map(_is_constant, read)):
                self._read(node, read)
        for value in graph.outputs:
            self._fix(value)
        self._settle()

    def neighbours(self) -> list[list[int]]:
        """The blocks, those together that stand in one row."""
        group = list(range(len(self.sizes)))
        for row in {tuple(row): None for row in self.rows.values()}:
            joined = {group[block] for block in row}
            if len(joined) > 1:
                group = [min(joined) if own in joined else own for own in group]
        return [[block for block, own in enumerate(group) if own == first] for first in sorted(set(group))]

    def _new(self, value: ir.Value | None) -> Numbers | None:
        """The channels of a tensor, new ones where nothing was said of it yet; None of others than images."""
        if value is None or len(shape_of(value)) != 4:
            return None
        size = shape_of(value)[1]
        if value not in self._of and isinstance(size, int):
            self._of[value] = np.arange(self._count, self._count + size)
            self._count += size
        return self._of.get(value)

    def _fix(self, *values: ir.Value | None) -> None:
        self._fixed += [found for value in values if (found := self._new(value)) is not None]

    def _read(self, node: ir.Node, read: Sequence[ir.Value]) -> None:
        """Notes which channels of what a node reads and gives are the same, and which have to stay."""
        given = node.outputs[0]
        if node.op_type == "Conv" and all(map(_is_stored, node.inputs[1:])):
            if is_depthwise(node) and self._give(given, self._new(node.inputs[0])):
                return self.readers.append(node)
            ends = [self._new(value) for value in (node.inputs[0], given)]
            if node.attributes.get_int("group", 1) == 1 and all(found is not None for found in ends):
                return self.readers.append(node)
        elif node.op_type in CHANNELWISE and _is_alike(node, read):
            first, *others = [self._new(value) for value in read]
            if self._give(given, first):
                self._ties += [(first, other) for other in others if first is not None and other is not None]
                return self.readers.append(node)
        elif node.op_type == "Concat" and node.attributes.get_int("axis", 0) == 1:
            parts = [found for value in read if (found := self._new(value)) is not None]
            if len(parts) == len(node.inputs) and self._give(given, np.concatenate(parts)):
                return self.readers.append(node)
        return self._fix(*read, *node.outputs)

    def _give(self, value: ir.Value, channels: Numbers | None) -> bool:
        """Says what the channels of a node's result are; whether they can be that."""
        if channels is None or shape_of(value)[1:2] != [len(channels)]:
            return False
        self._of[value] = channels
        return True

    def _settle(self) -> None:
        """Finds one number for all that is one channel, and then the blocks."""
        names = np.arange(self._count)
        unsettled = True
        while unsettled:
            unsettled = False
            for one, other in self._ties:
                least = np.minimum(names[one], names[other])
                if not (np.array_equal(names[one], least) and np.array_equal(names[other], least)):
                    np.minimum.at(names, one, least)  # a tensor may have one channel twice
                    np.minimum.at(names, other, least)
                    unsettled = True
        rows = {value: names[channels].tolist() for value, channels in self._of.items()}
        behind: dict[int, set[int]] = {}
        before: dict[int, set[int]] = {}
        for row in {tuple(row): None for row in rows.values()}:
            for left, right in zip([-1, *row], [*row, -1], strict=True):
                behind.setdefault(left, set()).add(right)
                before.setdefault(right, set()).add(left)
        begins = {channel for channel, left in before.items() if len(left) > 1 or any(len(behind[i]) > 1 for i in left)}
        begins |= {channel for channel, left in before.items() if -1 in left}
        block_of: dict[int, int] = {}
        self.sizes: list[int] = []
        for row in rows.values():
            for place, channel in enumerate(row):
                if channel not in block_of:
                    if channel in begins:
                        self.sizes.append(0)
                    block_of[channel] = len(self.sizes) - 1 if channel in begins else block_of[row[place - 1]]
                    self.sizes[block_of[channel]] += 1
        self.rows = {value: [block_of[i] for i in row if i in begins] for value, row in rows.items()}
        self.fixed = {block_of[int(channel)] for fixed in self._fixed for channel in names[fixed]}


def is_depthwise(node: ir.Node) -> bool:
    """Whether a node convolves each channel of an image by itself, and there are several."""
    shape = shape_of(node.inputs[1]) if node.op_type == "Conv" else []
    return len(shape) == 4 and shape[:2] == [node.attributes.get_int("group", 1), 1] and shape[0] > 1


def _is_alike(node: ir.Node, read: Sequence[ir.Value]) -> bool:
    """Whether all that a node reads and its one result have the same number of channels and axes, none is stored."""
    kinds = {(len(shape_of(value)), *shape_of(value)[1:2]) for value in (*read, *node.outputs)}
    return len(kinds) == 1 and len(node.outputs) == 1 and not any(map(_is_constant, read))


def _stored(value: ir.Value) -> ir.Value | None:
    """The constant that a value is or is dequantized from; None for others."""
    source = value.producer()
    stored = source.inputs[0] if source is not None and source.op_type == "DequantizeLinear" else value
    return stored if stored is not None and stored.const_value is not None else None


def _is_constant(value: ir.Value) -> bool:
    return _stored(value) is not None


def is_single(value: ir.Value) -> bool:
    """Whether a value is one stored number, quantized or not."""
    stored = _stored(value)
    return stored is not None and stored.const_value is not None and stored.const_value.size == 1


def _is_stored(value: ir.Value | None) -> bool:
    """Whether a weight or bias is a constant of a plain type, or dequantized, zero from zero and by output channel."""
    if value is None:
        return True
    source = value.producer()
    if source is not None and source.op_type == "DequantizeLinear":
        zeros = zeros_of(source)
        by_output = len(shape_of(source.inputs[1])) != 1 or source.attributes.get_int("axis", 1) == 0
        if zeros is None or zeros.any() or not by_output:
            return False
    stored = _stored(value)
    return stored is not None and stored.dtype in PLAIN
