"""Depthwise convolutions with several outputs for each channel, as ones with one output for each copy of a channel.

    y[m·c + j] = w[m·c + j] ∗ x[c] = w[m·c + j] ∗ x'[m·c + j],    x' every channel of x, m times

ONNX Runtime's integer convolution has a kernel for as many outputs as channels. Any more, and it multiplies group by
group: 7×7 over 48 channels with two outputs each takes 14.8 ms where the copies and that kernel take 0.4 (32×32 places,
AVX512-VNNI, one thread). MobileCLIP's and FastViT's downsampling is of that kind. No weight changes.

Left as it is: what reads so many places for each that it gives that the copies would take longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import CONVOLUTIONS, aten, by_axis, groups_of
from qtool.quantization.rewrites.shuffles import stays_float

MOST_COPIES = 24
"""Numbers copied for each place and channel of the result; a group's product takes about as long as 50."""


def repeat_inputs(graph_module: GraphModule, overrides: Mapping[str, str]) -> int:
    """Rewrites each such convolution in place, but for those that ``overrides`` leave in float; returns how many."""
    found = {node: outputs for node in graph_module.graph.nodes if (outputs := _outputs_each(node, overrides)) > 1}
    for conv, outputs in found.items():
        source = conv.args[0]
        assert isinstance(source, Node)
        rank = source.meta["val"].dim()
        apart = call_before(conv, aten.unsqueeze.default, source, 2)
        copies = call_before(conv, aten.expand.default, apart, [-1, -1, outputs, *[-1] * (rank - 2)])
        repeated = call_before(conv, aten.flatten.using_ints, copies, 1, 2)
        conv.args = (repeated, *conv.args[1:6], groups_of(conv) * outputs)
    if found:
        clean(graph_module)
    return len(found)


def _outputs_each(conv: Node, overrides: Mapping[str, str]) -> int:
    """How many outputs a depthwise convolution has for each channel; 0 for what is left as it is."""
    if conv.target not in CONVOLUTIONS[:2] or len(conv.args) < 7 or stays_float(conv, overrides):
        return 0
    source, weight = conv.args[:2]
    if not isinstance(source, Node) or not isinstance(weight, Node) or weight.op != "get_attr":
        return 0
    outputs, _, *taps = weight.meta["val"].shape
    groups = groups_of(conv)
    before, after = source.meta["val"].shape, conv.meta["val"].shape
    if groups == 1 or before[1] != groups:
        return 0
    each = outputs // groups
    known = all(isinstance(size, int) for size in (*before[2:], *after[2:]))
    places = math.prod(before[2:]) / math.prod(after[2:]) if known else math.prod(by_axis(conv.args[3], len(taps)))
    return each if places * each <= MOST_COPIES else 0
