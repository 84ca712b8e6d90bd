"""Repetitions of single places become expansions, of the same numbers, that integers pass through; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


class Points(nn.Module):
    """What is known of all points beside what is known of each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 16, 1), nn.Conv1d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return self.head(torch.cat([x.amax(2, keepdim=True).repeat(1, 1, x.shape[2]), x], 1))


def test_what_is_spread_over_all_points_stays_integer() -> None:
    model, x = Points().eval(), torch.randn(2, 3, 10)
    graph = float_form(model, x)
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), atol=1e-5)
    assert not Placement(graph, ORT_CPU).plan().float_units


class Repeated(nn.Module):
    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).repeat(self.counts) + 1


@pytest.mark.parametrize(
    ("shape", "counts", "spread"),
    [
        ((2, 1, 4), (1, 3, 1), True),
        ((2, 1, 1, 4), (1, 3, 2, 1), True),
        ((2, 3, 4), (1, 2, 1), False),
        ((2, 1, 4), (1, 3, 2), False),
    ],
)
def test_only_single_places_are_spread(shape: tuple[int, ...], counts: tuple[int, ...], spread: bool) -> None:
    model, x = Repeated(*counts).eval(), torch.randn(shape)
    graph = float_form(model, x)
    assert torch.equal(graph(x), model(x))
    assert any(node.target is aten.expand.default for node in graph.graph.nodes) == spread
