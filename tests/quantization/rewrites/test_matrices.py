"""Linear layers over sequences: the same numbers, as products of two matrices between reshapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.matrices import flatten_linears
from qtool.quantization.targets import ORT_CPU


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.a(x))
        return self.c(x + self.b(y))


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 2, 5, 4)])
def test_the_function_is_the_same_for_any_batch(shape: tuple[int, ...]) -> None:
    model, x = Tokens(), torch.randn(shape)
    graph = capture(model, x)
    assert flatten_linears(graph) == 3
    for batch in (x, x[:1], torch.cat([x, x])):
        torch.testing.assert_close(graph(batch), model(batch))
    linears = [n for n in graph.graph.nodes if n.target is aten.linear.default]
    assert all(n.meta["val"].dim() == 2 for n in linears)


def test_the_batch_may_stand_second() -> None:
    class Sequence(Tokens):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    model, x = Sequence(), torch.randn(3, 5, 4)
    graph = capture(model, x)
    assert flatten_linears(graph) == 3
    for batch in (x, x[:1], torch.cat([x, x])):
        torch.testing.assert_close(graph(batch), model(batch))


def test_the_activation_still_fuses_and_names_stay() -> None:
    graph = capture(Tokens(), torch.randn(3, 5, 4))
    flatten_linears(graph)
    placement = Placement(graph, ORT_CPU)
    assert [(u.name, u.kind, u.integer) for u in placement.plan().units] == [
        ("a", "linear", True), ("b", "linear", True), ("add", "add", True), ("c", "linear", True),
    ]  # fmt: skip
    first = next(p for p in placement.placed if p.unit.name == "a")
    assert [n.target for n in first.nodes] == [aten.linear.default, aten.relu.default]
    last = next(p for p in placement.placed if p.unit.name == "c")
    assert not last.quantized_output  # it leaves the graph through a reshape


def test_matrices_are_left_alone() -> None:
    graph = capture(Tokens(), torch.randn(3, 4))
    before = graph.code
    assert flatten_linears(graph) == 0
    assert graph.code == before
