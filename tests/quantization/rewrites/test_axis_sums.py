"""Sums over stacked branches, weighted or not, and over groups of channels are additions; other sums stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form

X = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Three convolutions of one input, and what ``join`` makes of them."""

    def __init__(self, join: Callable[[Any, list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=1) for _ in range(3))
        self.select, self.weights, self.join = nn.Linear(8, 24), nn.Parameter(torch.tensor([0.2, 0.5, 0.4])), join
        self.gain = nn.Parameter(torch.rand(8, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, [path(x).relu() for path in self.paths])


def summed(net: Branches, parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, 1).sum(1)


def ahead(net: Branches, parts: list[Tensor]) -> Tensor:
    """Stacked in front of the samples."""
    return (torch.stack(parts) * net.weights[:, None, None, None, None]).sum(0)


def scaled(net: Branches, parts: list[Tensor]) -> Tensor:
    """By one factor for each channel, of all parts."""
    return (torch.stack(parts, 1) * net.gain[None, None]).sum(1)


def averaged(net: Branches, parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, 1).mean(1)


def attended(net: Branches, parts: list[Tensor]) -> Tensor:
    """As SKNet has it."""
    both = torch.stack(parts, 1)
    scores = net.select(both.sum(1).mean((2, 3))).reshape(-1, 3, 8, 1, 1)
    return (both * scores.softmax(1)).sum(1)


def fused(net: Branches, parts: list[Tensor]) -> Tensor:
    """As EfficientDet has it."""
    return (torch.stack(parts, -1) * net.weights / (net.weights.sum() + 1e-4)).sum(-1)


def grouped(net: Branches, parts: list[Tensor]) -> Tensor:
    """As ResNeSt has it."""
    groups = parts[0].reshape(-1, 2, 4, 6, 6)
    weights = net.select(parts[1].mean((2, 3)))[:, :8].reshape(-1, 2, 4, 1, 1)
    return (groups * weights.sigmoid()).sum(1)


def forms(join: Callable[[Any, list[Tensor]], Tensor]) -> tuple[nn.Module, list[object]]:
    """The model, and the operators of its float form, which computes the same for any batch."""
    torch.manual_seed(0)
    model = Branches(join).eval()
    graph = float_form(model, X)
    with torch.no_grad():
        for batch in (X, X[:1], torch.cat([X, X])):
            torch.testing.assert_close(graph(batch), model(batch))
    return model, [node.target for node in graph.graph.nodes if node.op == "call_function"]


ATTENDED = ["softmax", "mul", "mul", "mul", "add", "add"]


@pytest.mark.parametrize(
    ("join", "in_float"),
    [(summed, []), (ahead, []), (scaled, []), (averaged, []), (attended, ATTENDED), (fused, []), (grouped, [])],
)
def test_parts_are_added_in_integers(join: Callable[[Any, list[Tensor]], Tensor], in_float: list[str]) -> None:
    model, operators = forms(join)
    assert not {aten.sum.dim_IntList, aten.cat.default} & {*operators}
    plan = qtool.quantize(model, [X], effort="fast").plan
    assert [unit.kind for unit in plan.float_units] == in_float


def shared(net: Branches, parts: list[Tensor]) -> Tensor:
    """What others read too is computed once."""
    weighted = torch.stack(parts, 1) * 0.5
    return weighted.sum(1) + weighted.amax(1)


OTHERS: dict[str, Callable[[Any, list[Tensor]], Tensor]] = {
    "a product that others read": shared,
    "many": lambda net, parts: torch.stack([*parts, *parts, *parts], 1).sum(1),
    "an axis that is kept": lambda net, parts: torch.stack(parts, 1).sum(1, keepdim=True),
    "two axes": lambda net, parts: torch.stack(parts, 1).sum((1, 2)),
    "channels": lambda net, parts: parts[0][:, :3].sum(1),
    "scores": lambda net, parts: net.select(parts[0].mean((2, 3))).reshape(-1, 3, 8).softmax(1).sum(1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    assert aten.sum.dim_IntList in forms(OTHERS[name])[1]
