"""Matching two captures of one computation, and what may not pass as a match."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.graphs.edits import copied
from qtool.graphs.operators import aten
from qtool.quantization.calibration.calibrate import calibrate
from qtool.quantization.capturing.capture import capture
from qtool.quantization.engines import pt2e
from qtool.quantization.engines.align import (
    Misaligned,
    align,
    check_quantizers,
    label_units,
    quantized_values,
    value_of,
)
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.constants import fold_quantized
from qtool.quantization.targets import ORT_CPU

Q = quantized.quantize_per_tensor.default


class Branches(nn.Module):
    """Two convolutions of one input, of which ``swapped`` turns the order, joined where the order matters."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.swapped = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), swapped
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.swapped:
            right = torch.relu(self.right(x))
            left = torch.relu(self.left(x))
        else:
            left, right = torch.relu(self.left(x)), torch.relu(self.right(x))
        return self.pool(torch.cat([left, right], 1))


def batch() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def graph_of(**options: Any) -> GraphModule:
    return capture(Branches(**options).eval(), batch())


def converted() -> tuple[Placement, GraphModule]:
    """A placement on a float graph, and that graph quantized."""
    graph = graph_of()
    other = copied(graph)
    prepared = pt2e.prepare(other, Placement(other, ORT_CPU))
    calibrate(prepared, [batch()])
    return Placement(graph, ORT_CPU), pt2e.convert(prepared)


def quantizer_after(graph: GraphModule, target: Any) -> Node:
    return next(n for n in graph.graph.nodes if n.target is Q and n.args[0].target is target)


def test_operators_are_found_whatever_the_order_of_branches() -> None:
    first, second = graph_of(), graph_of(swapped=True)
    pairs = align(first, second)
    owners = {node.meta["owner"]: pairs[node].meta["owner"] for node in pairs if node.target is aten.conv2d.default}
    assert owners == {"left": "left", "right": "right"}
    assert len(set(pairs.values())) == len(pairs)


def test_quantizers_do_not_hide_what_they_are_applied_to() -> None:
    placement, graph = converted()
    pairs = align(placement.graph_module, graph)
    check_quantizers(placement, pairs)
    label_units(placement, pairs)
    for placed in placement.placed:
        assert all(pairs[node].meta["unit"] == placed.unit.name for node in placed.nodes)
    output = next(n for n in graph.graph.nodes if n.op == "output").args[0][0]
    assert value_of(output).target is aten.max_pool2d.default


def test_an_operator_that_is_missing_or_too_many_is_named() -> None:
    first, second = graph_of(), graph_of()
    relu = next(n for n in second.graph.nodes if n.target is aten.relu.default)
    with second.graph.inserting_after(relu):
        extra = second.graph.call_function(aten.sigmoid.default, (relu,))
    with pytest.raises(Misaligned, match=r"'sigmoid.*' \(sigmoid.default in module ''\) is one too many"):
        align(first, second)
    second.graph.erase_node(extra)
    relu.replace_all_uses_with(relu.args[0])
    second.graph.erase_node(relu)
    with pytest.raises(Misaligned, match=r"'relu' .* is not there, or reads something else"):
        align(first, second)


def test_other_inputs_are_not_the_same_computation() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(Misaligned, match="2 inputs, not 1"):
        align(graph_of(), capture(Two(), (batch(), batch())))


def test_a_quantizer_that_is_missing_is_seen() -> None:
    placement, graph = converted()
    node = quantizer_after(graph, aten.relu.default)
    for read in list(node.users):
        read.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(read)
    graph.graph.erase_node(node)
    with pytest.raises(Misaligned, match="a quantizer is missing after 'relu"):
        check_quantizers(placement, align(placement.graph_module, graph))


def test_a_quantizer_too_many_is_seen() -> None:
    placement, graph = converted()
    conv = next(n for n in graph.graph.nodes if n.target is aten.conv2d.default)
    with graph.graph.inserting_after(conv):
        graph.graph.call_function(Q, (conv, 0.1, 0, 0, 255, torch.uint8))
    with pytest.raises(Misaligned, match="a quantizer is too many after 'conv2d"):
        check_quantizers(placement, align(placement.graph_module, graph))


def test_a_weight_in_float_is_seen() -> None:
    placement, graph = converted()
    conv = next(n for n in graph.graph.nodes if n.target is aten.conv2d.default)
    conv.update_arg(1, conv.args[1].args[0])
    with pytest.raises(Misaligned, match="the weight of 'left' is not quantized"):
        check_quantizers(placement, align(placement.graph_module, graph))


def test_a_move_that_changes_the_scale_is_seen() -> None:
    placement, graph = converted()
    node = quantizer_after(graph, aten.max_pool2d.default)
    node.update_arg(1, node.args[1] * 1.05)
    with pytest.raises(Misaligned, match="'pool' changes the scale of what it only moves"):
        check_quantizers(placement, align(placement.graph_module, graph))


def test_what_a_placement_quantizes() -> None:
    graph = graph_of()
    names = {node.name for node in quantized_values(Placement(graph, ORT_CPU))}
    assert names == {"x", "relu", "relu_1", "cat", "max_pool2d"}


def test_quantized_constants_become_integers() -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 1, 1, generator=torch.Generator().manual_seed(0)))
            self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.3, 0.4]))
            self.register_buffer("zero", torch.zeros(4, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            form = (self.scale, self.zero, 0, -127, 127, torch.int8)
            integers = quantized.quantize_per_channel(self.weight, *form)
            return nn.functional.conv2d(x, quantized.dequantize_per_channel(integers, *form))

    model = Folds()
    graph = capture(model, batch())
    wanted = graph(batch())
    fold_quantized(graph)
    assert not any(n.target is quantized.quantize_per_channel.default for n in graph.graph.nodes)
    (stored,) = (b for b in graph.buffers() if b.dtype == torch.int8)
    assert torch.equal(stored, (model.weight / model.scale.reshape(-1, 1, 1, 1)).round().to(torch.int8))
    assert torch.equal(graph(batch()), wanted)
