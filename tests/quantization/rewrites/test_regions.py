from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU

HELD = torch.ops.higher_order.wrap_with_autocast


class Regions(nn.Module):
    """A layer without autocast, one in a region of a GPU within it, and one behind."""

    def __init__(self, *, device: str = "cpu", enabled: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.device, self.enabled = device, enabled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.enabled):
            x = self.a(x).relu_()
            with torch.autocast("cpu", enabled=False):
                y = self.b(x.float())
            z = x + y
        return self.c(z.float()), y


def test_a_region_without_autocast_is_its_operators() -> None:
    torch.manual_seed(0)
    model, x = Regions().eval(), torch.randn(2, 3, 6, 6)
    graph = capture(model, x)
    found = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    convolution = aten.conv2d.default
    assert found == [convolution, aten.relu.default, convolution, aten.add.Tensor, convolution]
    assert [unit.integer for unit in Placement(graph, ORT_CPU).plan().units] == [True] * 4
    for batch in (x, x[:1]):
        for got, wanted in zip(graph(batch), model(batch), strict=True):
            torch.testing.assert_close(got, wanted)


def test_training_sees_the_operators_too() -> None:
    graph = capture(Regions(), torch.randn(2, 3, 6, 6), train=True)
    assert HELD not in {node.target for node in graph.graph.nodes}


class Tuned(nn.Module):
    """A layer that gradients are turned on for, which another without them is within."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(True):
            x = self.a(x).relu()
            with torch.no_grad():
                y = self.b(x)
        y = self.c(x + y)
        assert isinstance(y, Tensor)
        return y


@pytest.mark.parametrize("train", [False, True])
def test_a_region_with_gradients_is_its_operators(train: bool) -> None:
    model, x = Tuned().eval(), torch.randn(2, 8)
    graph = capture(model, x, train=train)
    found = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    linear = aten.linear.default
    assert found == [linear, aten.relu.default, linear, aten.add.Tensor, linear]
    torch.testing.assert_close(graph(x), model(x))


def test_a_region_of_16_bits_is_refused_before_the_work() -> None:
    """No runtime that files are written for has kernels for it, and no saved graph holds it."""
    with pytest.raises(QtoolError, match=r"got wrap_with_autocast; at .*test_regions\.py:\d+, write it as"):
        capture(Regions(enabled=True).eval(), torch.randn(2, 3, 6, 6))
