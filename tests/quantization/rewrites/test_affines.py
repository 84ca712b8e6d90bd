from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.affines import write_affines
from qtool.quantization.rewrites.products import write_products
from qtool.quantization.targets import ORT_CPU

Write = Callable[[Any, Tensor], Tensor]


class Affine(nn.Module):
    """Two convolutions; ``write`` says what stands between them."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3, padding=1)
        self.scale, self.shift = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor([-0.3]))
        self.row = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self, self.first(x)))


BETWEEN: dict[str, Write] = {
    "affine": lambda m, y: m.scale * y.relu() + m.shift,
    "by channel": lambda m, y: y.relu() * m.row[:, None, None] - m.row.view(1, 6, 1, 1),
    "a sum alone": lambda m, y: 1.5 + F.relu6(y),
    "a gain": lambda m, y: F.silu(y) * 1.7871 * 0.5,
    "a divisor": lambda m, y: (y + F.max_pool2d(y, 3, 1, 1)) / 2,
    "one after the other": lambda m, y: (y.relu() * m.row[:, None, None] + m.shift).relu() * -2,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_integers_it_is_a_convolution(name: str) -> None:
    torch.manual_seed(0)
    model, x = Affine(BETWEEN[name]).eval(), torch.randn(2, 3, 6, 6)
    graph = float_form(model, x)
    write_products(graph, ORT_CPU.products)
    assert len(write_affines(graph, ORT_CPU)) == (2 if name == "one after the other" else 1)
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-5, atol=1e-5)
    assert all(unit.integer for unit in Placement(graph, ORT_CPU).plan().units)


ELSEWHERE: dict[str, Write] = {
    "of a float": lambda m, y: y.sin() * m.scale,
    "read in float": lambda m, y: (y.relu() * m.row[:, None, None]).sin(),
    "along another axis": lambda m, y: y * torch.ones(4),
    "of a computed factor": lambda m, y: y * (m.scale * y.mean((1, 2, 3), keepdim=True)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_it_stays(name: str) -> None:
    torch.manual_seed(0)
    model, x = Affine(ELSEWHERE[name]).eval(), torch.randn(2, 3, 6, 6)
    graph = float_form(model, x)
    assert not write_affines(graph, ORT_CPU)
    torch.testing.assert_close(graph(x), model(x))


def test_what_makes_the_input_ready_stays_in_front() -> None:
    class Ready(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv((x - 0.5) / 0.25)

    graph = float_form(Ready().eval(), torch.randn(2, 3, 6, 6))
    assert not write_affines(graph, ORT_CPU)
    assert aten.sub.Tensor in {node.target for node in graph.graph.nodes}
