"""Stored bounds of one number clip as numbers do, in the layer before; infinite ones do nothing, others stay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


class Clipped(nn.Module):
    """A layer that clips what it reads and what it gives by buffers, as those of a Gemma's images do."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 1)
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.clamp(x, self.low, self.high)).clamp(self.low, self.high)  # type: ignore[call-overload, no-any-return]


def operators(model: nn.Module, x: Tensor) -> list[object]:
    graph = float_form(model.eval(), x)
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("low", "high", "clips"),
    [
        (-math.inf, math.inf, []),
        (-0.5, math.inf, [aten.clamp.default]),
        (-0.5, 0.25, [aten.clamp.default]),
        (0.0, math.inf, [aten.relu.default]),
    ],
)
def test_bounds_are_numbers_and_infinite_ones_none(low: float, high: float, clips: list[object]) -> None:
    assert operators(Clipped(low, high), X) == [*clips, aten.conv2d.default, *clips]


class Learned(nn.Module):
    """PACT."""

    def __init__(self, *shape: int, first: bool = False) -> None:
        super().__init__()
        self.layer, self.bound, self.first = nn.Conv2d(3, 8, 1), nn.Parameter(torch.full(shape, 0.5)), first

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layer(x))
        return torch.minimum(self.bound, x) if self.first else torch.minimum(x, self.bound)


@pytest.mark.parametrize("first", [False, True])
def test_a_learned_bound_is_part_of_the_layer(first: bool) -> None:
    model = Learned(1, first=first).eval()
    assert operators(model, X) == [aten.conv2d.default, aten.clamp.default]
    assert not Placement(float_form(model, X), ORT_CPU).plan().float_units


def test_bounds_for_each_channel_stay() -> None:
    assert aten.minimum.default in operators(Learned(8, 1, 1), X)


def test_bounds_that_are_not_set_are_no_damage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Clipped(-math.inf, math.inf), nn.Flatten(), nn.Linear(128, 4))
    assert not qtool.quantize(model, [X], effort="fast").plan.float_units
