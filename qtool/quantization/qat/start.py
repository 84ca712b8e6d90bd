"""Where training starts: weights that round to the integers which post-training quantization chose.

The passes over a quantized graph (``gptq-small``, AdaRound, corrected biases) choose integers q by what layers really
read; to round to the nearest would forget that. Training goes on from them: with s their scale, each weight begins at

    w ← clamp(w, s·(q − h), s·(q + h)),   h = 0.2,

which rounds to q, and lies so far inside its step that the first moves of an optimizer do not take it out again, as
they would one at an edge (which goes back and forth there, arXiv 2203.11086). Biases begin as they were corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.graphs.edits import clean, parameter, set_parameter
from qtool.quantization.algorithms.bias import set_bias
from qtool.quantization.algorithms.student import tensor_of
from qtool.quantization.calibration.observers import PerChannelFakeQuantizer
from qtool.quantization.integers import WEIGHTED
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import weight_edge
from qtool.quantization.stored_weights import dequantize_of, integers_of, scales_of

INSIDE = 0.2
"""h, of a step. A ResNet of 4-bit weights ended at 28.7 dB with 0.48, 31.3 with 0.2; a MobileNet at 20.9 and 23.3."""


@dataclass(frozen=True)
class Rounded:
    """A layer of a quantized graph: integers and scales of its weight's shape, the scales as stored, a float bias."""

    integers: Tensor
    scales: Tensor
    stored: Tensor
    bias: Tensor | None


def rounded_layers(graph: GraphModule, placement: Placement) -> dict[str, Rounded]:
    """The layers of a converted graph, whose biases are float still, by unit."""
    units = {placed.unit.name for placed in placement.layers}
    found = {}
    for node in graph.graph.nodes:
        unit = str(node.meta.get("unit"))
        if node.target in WEIGHTED and unit in units:
            stored = parameter(graph, dequantize_of(node).args[1])
            assert stored is not None
            bias = parameter(graph, node.args[2]) if len(node.args) > 2 else None
            found[unit] = Rounded(integers_of(graph, node), scales_of(graph, node), stored, bias)
    return found


def with_learned(ranges: Mapping[str, Any], graph: GraphModule) -> Mapping[str, Any]:
    """``ranges``, or with the ends of a converted graph's grids where ``steps`` learned other scales than theirs."""
    if not any("learned" in entry for entry in ranges.values()):
        return ranges
    found = dict(ranges)
    for node in graph.graph.find_nodes(op="call_function", target=quantized.quantize_per_tensor.default):
        name, (scale, zero_point, qmin, qmax) = tensor_of(node), node.args[1:5]
        if "low" in found.get(name, ()):
            found[name] = found[name] | {"low": (qmin - zero_point) * scale, "high": (qmax - zero_point) * scale}
    return found


def begin_at(layers: Mapping[str, Rounded], graph: GraphModule, placement: Placement) -> None:
    """Moves the float weights of a graph to where they round to ``layers``, and gives it their biases, in place."""
    for placed in placement.layers:
        node, layer = placed.anchor, layers.get(placed.unit.name)
        weight = parameter(graph, node.args[1])
        if layer is None or weight is None:
            continue
        ends = [(layer.integers + side) * layer.scales for side in (-INSIDE, INSIDE)]  # scales of 4 bits have a sign
        within = weight.clamp(torch.minimum(*ends), torch.maximum(*ends))
        assert isinstance(node.args[1], Node)
        set_parameter(graph, str(node.args[1].target), within.to(weight.dtype))
        if layer.bias is not None:
            set_bias(graph, node, layer.bias)
    clean(graph)


def keep_scales(layers: Mapping[str, Rounded], prepared: GraphModule) -> None:
    """Gives the fake-quantizers of weights the scales that ``layers`` have."""
    for node in prepared.graph.nodes:
        layer = layers.get(str(node.meta.get("unit"))) if node.target in WEIGHTED else None
        if layer is not None:
            fake = prepared.get_submodule(str(weight_edge(node)[0].target))
            assert isinstance(fake, PerChannelFakeQuantizer)
            fake.scale = layer.stored.flatten().clone()
