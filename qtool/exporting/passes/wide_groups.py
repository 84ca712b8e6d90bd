"""Merges the groups of a grouped convolution to groups of about 32 channels.

ONNX Runtime's integer convolution multiplies group by group, and a group of 4 or 8 channels is over before it has
begun: 32 groups of 4 take four times the time of 4 groups of 32, which multiply eight times as many numbers, and over
three times that of a float convolution. A merged group reads the channels of all its parts, with zeros for those that
an output does not belong to:

    W'[o, (j mod m)·w + i] = W[o, i],   0 elsewhere,   j the group of output o, w channels a group, m groups in one.

The products that are added are zeros; no sum changes. A file grows by 2 % of its constants at most, a small one by 2 kB
(EEGNet's convolution over electrodes, two outputs for each channel, takes a fifth of the time for it on AVX2). Where
that is not enough for all groups, it goes step by step to what saves the most time for its weights: with K products for
each of N outputs, a group takes about 49 + 0.0055 K N ns for each place of an image (N in whole sixteens; measured on
AVX2, the product at half of its time there, which VNNI takes). Depthwise convolutions have a kernel of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import MOST_GROWTH, constant, dequantized, integer_taps, room

WIDTH = 32
FEW = 2048
"""Numbers that a small file may grow by in any case."""


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions have fewer groups now."""
    left = max(room(model, MOST_GROWTH), FEW)
    layers = [_Layer(node, taps) for node in model.graph if (taps := _grouped_weight(node)) is not None]
    while steps := [step for layer in layers for step in layer.steps(left)]:
        layer, merged, growth = max(steps, key=lambda step: step[0].saved(step[1]) / step[2])
        layer.merged = merged
        left -= growth
    changed = [layer for layer in layers if layer.merged > 1]
    for layer in changed:
        _rewrite(model, layer.node, layer.taps, layer.merged)
    drop_unused(model)
    return len(changed)


@dataclass
class _Layer:
    """A grouped convolution, and how many of its groups are made one."""

    node: ir.Node
    taps: npt.NDArray[np.int8]
    merged: int = 1

    def __post_init__(self) -> None:
        self.groups = self.node.attributes.get_int("group", 1)
        width = max(self.taps.shape[1], len(self.taps) // self.groups)
        divisors = [m for m in range(1, self.groups + 1) if self.groups % m == 0]
        best = min(divisors, key=lambda m: abs(math.log(m * width / WIDTH)))
        self._divisors = [m for m in divisors if m <= best]
        self._places = math.prod(size for size in (self.node.outputs[0].shape or ())[2:] if isinstance(size, int))

    def steps(self, most: float) -> list[tuple[_Layer, int, int]]:
        """How many groups may be made one instead, and the numbers that it takes, ``most`` at most."""
        growths = [(m, self.taps.size * (m - self.merged)) for m in self._divisors if m > self.merged]
        return [(self, m, growth) for m, growth in growths if growth <= most]

    def saved(self, merged: int) -> float:
        """By how much less time the convolution takes, in nanoseconds."""
        return self._time(self.merged) - self._time(merged)

    def _time(self, merged: int) -> float:
        outputs = -(-merged * len(self.taps) // self.groups // 16) * 16
        products = merged * self.taps[0].size * outputs
        return float(self._places * self.groups / merged * (49 + 0.0055 * products))


def _grouped_weight(node: ir.Node) -> npt.NDArray[np.int8] | None:
    """The integer weight of a grouped convolution that is not depthwise; None of anything else."""
    taps = integer_taps(node)
    if taps is None or node.attributes.get_int("group", 1) == 1:
        return None
    depthwise = taps.shape[1] == 1 and len(taps) == node.attributes.get_int("group", 1)
    return None if depthwise else taps


def _rewrite(model: ir.Model, node: ir.Node, taps: npt.NDArray[np.int8], merged: int) -> None:
    groups = node.attributes.get_int("group", 1)
    outputs, width, *kernel = taps.shape
    wide = np.zeros((outputs, merged, width, *kernel), taps.dtype)
    own = np.arange(outputs) // (outputs // groups) % merged
    wide[np.arange(outputs), own] = taps
    name = f"{node.name or node.outputs[0].name}/weight/merged"
    stored = constant(model, name, wide.reshape(outputs, merged * width, *kernel))
    source = node.inputs[1].producer() if node.inputs[1] is not None else None
    assert source is not None
    dequantized(model, node, 1, [stored, *source.inputs[1:]], f"{name}/dequantized")
    node.attributes["group"] = ir.AttrInt64("group", groups // merged)
