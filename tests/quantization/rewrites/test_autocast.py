from __future__ import annotations

import torch
from torch import Tensor, nn

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


def test_a_region_of_16_bits_stays() -> None:
    graph = capture(Regions(enabled=True).eval(), torch.randn(2, 3, 6, 6))
    assert HELD in {node.target for node in graph.graph.nodes}
