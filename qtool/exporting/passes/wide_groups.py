"""Merges the groups of a grouped convolution to groups of about 32 channels.

ONNX Runtime's integer convolution multiplies group by group, and a group of 4 or 8 channels is over before it has
begun: 32 groups of 4 take four times the time of 4 groups of 32, which multiply eight times as many numbers, and over
three times that of a float convolution. A merged group reads the channels of all its parts, with zeros for those that
an output does not belong to:

    W'[o, (j mod m)·w + i] = W[o, i],   0 elsewhere,   j the group of output o, w channels a group, m groups in one.

The products that are added are zeros; no sum changes. A file grows by 2 % of its constants at most, a small one by 2 kB
(EEGNet's convolution over electrodes, two outputs for each channel, takes a fifth of the time for it on AVX2), the
first layers first: they have the fewest weights and the most to compute. Depthwise convolutions have a kernel of their
own.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import MOST_GROWTH, constant, dequantized, integer_taps, num_stored

WIDTH = 32
FEW = 2048
"""Numbers that a small file may grow by in any case."""


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions have fewer groups now."""
    left = max(MOST_GROWTH * num_stored(model), FEW)
    changed = 0
    for node in list(model.graph):
        weight = _grouped_weight(node)
        if weight is None:
            continue
        groups = node.attributes.get_int("group", 1)
        merged = _best(groups, max(weight.shape[1], len(weight) // groups), left / weight.size + 1)
        if merged > 1:
            _rewrite(model, node, weight, merged)
            left -= weight.size * (merged - 1)
            changed += 1
    drop_unused(model)
    return changed


def _grouped_weight(node: ir.Node) -> npt.NDArray[np.int8] | None:
    """The integer weight of a grouped convolution that is not depthwise; None of anything else."""
    taps = integer_taps(node)
    if taps is None or node.attributes.get_int("group", 1) == 1:
        return None
    depthwise = taps.shape[1] == 1 and len(taps) == node.attributes.get_int("group", 1)
    return None if depthwise else taps


def _best(groups: int, width: int, most: float) -> int:
    """How many groups to make one of, ``most`` at most: the divisor that brings their width nearest to 32."""
    divisors = [m for m in range(1, groups + 1) if groups % m == 0 and m <= most]
    return min(divisors, key=lambda m: abs(math.log(m * width / WIDTH)), default=1)


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
