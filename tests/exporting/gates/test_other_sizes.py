"""What a graph of open sizes is run with beside its samples: sizes of one input follow those of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.gates.other_sizes import OtherSizes
from qtool.nested import tensors
from qtool.quantization.capturing.capture import capture


class Twice(nn.Module):
    """A sequence, and one twice as long; what does not count samples stays."""

    def forward(self, x: Tensor, longer: Tensor, factor: Tensor) -> Tensor:
        return torch.cat([x, x], 1) * longer * factor


class Still(nn.Module):
    """A window of at least as many as the samples have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(1, 5, 1)


def shapes(inputs: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in tensors(inputs)]


@pytest.mark.parametrize("named", [False, True])
def test_sizes_that_follow_others_are_changed_with_them(named: bool) -> None:
    given = {"x": torch.randn(4, 6), "longer": torch.randn(4, 12), "factor": torch.tensor(2.0)}
    inputs = given if named else tuple(given.values())
    sizes = OtherSizes(capture(Twice(), inputs, axes=(1,)))
    sizes.try_batches(dict(reversed(given.items())) if named else inputs)
    sizes.try_open_sizes(inputs)
    assert [sorted(shapes(taken)) for taken, _ in sizes.taken] == [
        [(), (1, 6), (1, 12)], [(), (3, 6), (3, 12)], [(), (2, 3), (2, 6)], [(), (2, 7), (2, 14)],
    ]  # fmt: skip
    for taken, made in sizes.taken:
        assert torch.equal(made, Twice()(**taken) if named else Twice()(*taken))
    assert sizes.refused == []


def test_what_the_graph_refuses_is_told_and_twice_the_size_tried() -> None:
    x = torch.randn(2, 8)
    sizes = OtherSizes(capture(Still(), x, axes=(1,)))
    sizes.try_open_sizes(x)
    assert [shapes(taken) for taken, _ in sizes.taken] == [[(2, 9)]]
    assert sizes.refused == ["2 × 4"]
    sizes = OtherSizes(capture(Even(), x, axes=(1,)))
    sizes.try_open_sizes(x[:, :2])
    assert [shapes(taken) for taken, _ in sizes.taken] == [[(2, 4)]]
    assert sizes.refused == ["2 × 3"]


class Even(nn.Module):
    """Pairs."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.unflatten(1, (-1, 2)).flip(2).flatten(1)
