"""Paddings that became a convolution's: the same numbers, one unit fewer, every gate passed, in both engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qtool
from qtool.form import padding_of, quantize_nodes
from qtool.quantization import stage
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig
from qtool.runtimes.ort import optimized_graph
from qtool.runtimes.torch_integer_conv import is_exact_here, with_integer_convolutions


class Uneven(nn.Module):
    """TensorFlow's "same" at stride 2: uneven paddings before a layer, a depthwise one and two at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)  # torch.ao does not quantize an input that is padded at once
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.first, self.relu = nn.Conv2d(3, 8, 3, 2), nn.ReLU6()
        self.wide = nn.ConstantPad2d((1, 2, 2, 1), 0.0)
        self.depthwise = nn.Conv2d(8, 8, 5, 2, groups=8)
        self.left, self.right = nn.Conv2d(8, 6, 3), nn.Conv2d(8, 6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.first(self.pad(self.stem(x))))
        x = self.depthwise(self.wide(x))
        both = nn.functional.pad(x, (2, 0, 0, 1))
        return (self.relu(self.left(both)) + self.right(both)).mean((2, 3))


def made(**options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    model = Uneven().eval()
    return quantize(model, QuantizeConfig(**options), example=x[:2], calibration=[x]), x


@pytest.mark.parametrize("options", [{}, {"engine": "torch.ao", "algorithms": None}], ids=["pt2e", "torch.ao"])
def test_the_numbers_are_the_same_without_the_quantizers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, x = made(**options)
    monkeypatch.setattr(stage, "absorb", lambda graph, plan: plan)
    before, _ = made(**options)
    kinds = [unit.kind for unit in before.plan.units]
    assert kinds.count("pad") == 3
    assert [unit.kind for unit in quantized.plan.units] == [kind for kind in kinds if kind != "pad"]
    assert len(quantize_nodes(quantized.graph)) == len(quantize_nodes(before.graph)) - 3
    assert torch.equal(quantized(x), before(x))
    for pad in (node for node in quantized.graph.graph.nodes if padding_of(node) is not None):
        (convolution,) = pad.users
        assert pad.meta["custom"] == convolution.meta["custom"]
    modules = {unit.name: unit.modules for unit in quantized.plan.units}
    assert "pad" in modules["first"]
    assert "wide" in modules["depthwise"]


@pytest.mark.parametrize("engine", ["pt2e", "torch.ao"])
def test_the_file_pads_within_its_convolutions_and_passes_every_gate(engine: str, tmp_path: Path) -> None:
    quantized, x = made(engine=engine, algorithms=None)
    exported = qtool.export(quantized, tmp_path / "out", samples=[x], baselines=None)
    assert all(gate["passed"] is not False for gate in exported.gates)
    kinds = [node.op_type for node in optimized_graph(exported.files["int8"]).graph.node]
    assert "Pad" not in kinds
    assert kinds.count("QLinearConv") == 5


def test_a_padded_input_is_quantized_before_it_is_padded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    quantized = quantize(model, QuantizeConfig(), example=x[:2], calibration=[x])
    exported = qtool.export(quantized, tmp_path / "out", samples=[x], baselines=None)
    assert all(gate["passed"] is not False for gate in exported.gates)
    kinds = [node.op_type for node in optimized_graph(exported.files["int8"]).graph.node]
    assert "Pad" not in kinds
    assert "SpaceToDepth" in kinds  # the stem's rewriting sees the input's even size again


def test_the_integer_simulation_pads_with_the_zero_point() -> None:
    if not is_exact_here():
        pytest.skip("needs a CPU with VNNI")
    quantized, x = made()
    lowered, count = with_integer_convolutions(quantized.graph)
    assert count == 5
    torch.testing.assert_close(lowered(x), quantized(x), rtol=0, atol=0.05)


def test_a_padding_that_others_read_or_with_ones_stays() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read_twice = nn.functional.pad(self.first(x), (0, 1, 0, 1))
            y = self.second(read_twice) + read_twice[:, :, 1:-1, 1:-1]
            return self.third(nn.functional.pad(y, (0, 1, 0, 1), value=1.0))

    x = torch.randn(4, 3, 12, 12)
    quantized = quantize(Others().eval(), QuantizeConfig(), example=x[:2], calibration=[x])
    units = {(unit.kind, unit.integer) for unit in quantized.plan.units}
    assert ("pad", True) in units
    assert ("pad", False) in units or any(not unit.integer for unit in quantized.plan.units)


def test_which_paddings_are_zeros() -> None:
    graph = torch.export.export(
        nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 2.0), nn.ZeroPad2d(-1)),
        (torch.randn(1, 1, 4, 4),),
    ).graph
    found = [padding_of(node) for node in graph.nodes if node.op == "call_function"]
    assert found == [[0, 1, 2, 0], None, None, None]


def test_a_reverted_convolution_pads_numbers(tmp_path: Path) -> None:
    from qtool.exporting.revert import in_float

    quantized, x = made(algorithms=None)
    reverted = in_float(quantized, {"left": "slower in integers"})
    exported = qtool.export(
        dataclasses.replace(reverted, float_graph=None), tmp_path / "out", samples=[x], baselines=None
    )
    assert all(gate["passed"] is not False for gate in exported.gates)
