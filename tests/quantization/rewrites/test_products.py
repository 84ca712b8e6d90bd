"""Smooth activations as products: the same function, every part of it integer in the plan and in the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from nets import settled
from nets_modern import efficientnet_b0, mobilenet_v3_large
from torch import nn
from torch.nn import functional as F

from qtool.exporting.stage import export
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.products import GATES, write_products
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU
from qtool.recipe import ExportConfig, QuantizeConfig

SMALL_V3 = ((3, 16, 16, 1, 0, 1), (5, 72, 24, 1, 1, 2))
SMALL_B0 = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 5))


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize("function", [F.silu, F.hardswish], ids=["silu", "hardswish"])
def test_the_graph_computes_the_same(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net, x = Net(function).eval(), torch.randn(2, 3, 9, 9)
    graph = capture(net, x)
    assert write_products(graph, tuple(GATES)) == 1
    assert write_products(graph, tuple(GATES)) == 0
    torch.testing.assert_close(graph(x), net(x), rtol=1e-5, atol=1e-6)


BEGINNING = [
    "0.0",
    "1",
    "1_2",
    "2.body.0.0",
    "2.body.1",
    "2.body.1_2",
    "2.body.2.pool",
    "2.body.2.gate",
    "2.body.2.mul",
]


@pytest.mark.parametrize(
    ("model", "in_float"),
    [(mobilenet_v3_large(10, SMALL_V3, 32), []), (efficientnet_b0(10, SMALL_B0, 32), BEGINNING)],
    ids=["v3", "b0"],
)
def test_nothing_of_these_networks_stays_in_float_but_b0s_beginning(
    model: nn.Module, in_float: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = settled(model, 32)
    batches = list(torch.randn(16, 3, 32, 32).split(8))
    quantized = quantize(model, QuantizeConfig(), example=batches[0][:2], calibration=batches)
    assert [unit.name for unit in quantized.plan.float_units] == in_float
    files = export(quantized, tmp_path, ExportConfig(baselines=None), samples=batches).files  # the gates are the proof
    ops = {node.op_type for node in onnx.load(files["int8"]).graph.node}
    assert not {"HardSigmoid", "HardSwish"} & ops


def beginning(channels: int, groups: int, behind: nn.Module) -> nn.Sequential:
    second = nn.Conv2d(channels, channels, 3, groups=groups, bias=False)
    first = [nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.SiLU()]
    return nn.Sequential(*first, second, nn.BatchNorm2d(channels), behind, nn.Conv2d(channels, 4, 1))


@pytest.mark.parametrize("train", [False, True], ids=["folded", "live batch-norm"])
@pytest.mark.parametrize("written", [False, True], ids=["SiLU", "product"])
@pytest.mark.parametrize(
    ("model", "in_float"),
    [
        (beginning(32, 32, nn.SiLU()), ["0", "3"]), (beginning(33, 33, nn.SiLU()), []),
        (beginning(16, 1, nn.SiLU()), []), (beginning(16, 16, nn.ReLU()), []),
    ],
    ids=["few channels", "more channels", "not depthwise", "no second SiLU"],
)  # fmt: skip
def test_a_beginning_of_few_channels_and_silus_stays_in_float(
    model: nn.Module, in_float: list[str], written: bool, train: bool
) -> None:
    graph = capture(model if train else model.eval(), torch.randn(2, 3, 9, 9), train=train)
    if written:
        write_products(graph, ORT_CPU.products)
    units = {unit.name: unit for unit in Placement(graph, ORT_CPU).plan().units}
    assert [name for name in ("0", "3", "6") if not units[name].integer] == in_float


def test_a_gate_has_steps_of_one_256th_whatever_the_data() -> None:
    model, x = Net(F.silu).eval(), torch.randn(4, 3, 9, 9)
    found = quantize(model, QuantizeConfig(), example=x, calibration=[x * 0.01]).ranges
    fixed = {name: entry for name, entry in found.items() if entry.get("method") == "fixed"}
    assert [(entry["low"], entry["high"]) for entry in fixed.values()] == [(0.0, 255 / 256)]


class Copies(nn.Module):
    """Operators that copy numbers, and activations that the quantizer does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3)
        self.c = nn.Conv2d(16, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardtanh(self.a(F.pad(x, (0, 1, 0, 1))))
        z = F.interpolate(self.b(F.pad(y, (1, 1, 1, 1))), scale_factor=2, mode="nearest")
        w = F.interpolate(y, size=z.shape[2:], mode="nearest")
        return self.c(F.max_pool2d(torch.cat([z, w], 1), 2))


def test_padding_upsampling_and_hardtanh_stay_in_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Copies().eval(), list(torch.randn(16, 3, 32, 32).split(8) * 3)
    quantized = quantize(model, QuantizeConfig(), example=batches[0][:2], calibration=batches)
    kinds = {unit.kind for unit in quantized.plan.integer_units}
    assert {"pad", "upsample", "conv", "concat", "max_pool"} <= kinds
    assert not quantized.plan.float_units
    export(quantized, tmp_path, ExportConfig(baselines=None), samples=batches)  # the gates are the proof
