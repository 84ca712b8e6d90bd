"""CLIP's GELU and a Swish with a factor of its own are SiLU between layers that take the factor in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.steep_gates import write_steep_gates
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Swish(nn.Module):
    """The factor was learned, and is less than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor([-1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.beta) * x


def blocks(activation: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    convolutions = (nn.Conv2d(3, 8, 3), activation, nn.AvgPool2d(2), nn.Conv2d(8, 4, 3, padding=1))
    return {
        "tokens": (nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 16)), torch.randn(8, 5, 16)),
        "image": (nn.Sequential(*convolutions), torch.randn(8, 3, 10, 10)),
    }


@pytest.mark.parametrize("kind", ["tokens", "image"])
@pytest.mark.parametrize("activation", [QuickGelu, Swish])
def test_no_product_is_left_beside_the_gate_s_own(activation: type[nn.Module], kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = blocks(activation())[kind]
    axes = (1,) if kind == "tokens" else ()
    form = quantize(net.eval(), QuantizeConfig(dynamic_axes=axes), example=x, calibration=[x])
    layer = "linear" if kind == "tokens" else "conv"
    kinds = sorted(unit.kind for unit in form.plan.units if unit.kind != "avg_pool")
    assert kinds == sorted([layer, "sigmoid", "mul", layer])
    assert all(unit.integer for unit in form.plan.units)
    with torch.no_grad():
        error, size = (form(x) - net(x)).norm(), net(x).norm()
    assert float(error / size) < 0.03
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    assert {gate["passed"] for gate in exported.gates} <= {True, None}


class Shared(nn.Module):
    """What the first layer gives is read elsewhere, and so is what the second product gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), QuickGelu()

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.act(self.b(self.act(first) + first))
        return self.c(second) + second


def test_what_something_else_reads_is_left_alone() -> None:
    net, x = Shared().eval(), torch.randn(4, 4)
    graph = float_form(net, x)
    assert write_steep_gates(graph) == 0
    assert not graph.graph.find_nodes(op="call_function", target=aten.silu.default)
    torch.testing.assert_close(graph(x), net(x))
