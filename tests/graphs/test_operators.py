"""What the arguments of a captured graph's operators say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from qtool.graphs.operators import CONVOLUTIONS, adaptive_windows, by_axis, groups_of, output_axis


@pytest.mark.parametrize(
    ("layer", "axis"),
    [
        (nn.Conv2d(4, 6, 2, groups=2), 0),
        (nn.Conv1d(4, 6, 2), 0),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), 1),
        (nn.ConvTranspose1d(4, 6, 2), 1),
    ],
)
def test_the_axis_of_output_channels_and_the_groups(layer: Any, axis: int) -> None:
    x = torch.ones(2, 4, *[5] * len(layer.kernel_size))
    nodes: list[Node] = list(torch.export.export(layer, (x,)).graph.nodes)
    (anchor,) = (node for node in nodes if node.target in CONVOLUTIONS)
    weight = anchor.args[1]
    assert isinstance(weight, Node)
    assert output_axis(anchor) == axis
    assert groups_of(anchor) == layer.groups
    assert weight.meta["val"].shape[axis] * (layer.groups if axis else 1) == layer.out_channels


@pytest.mark.parametrize(("value", "numbers"), [(2, [2, 2, 2]), ([3], [3, 3, 3]), ((1, 2, 3), [1, 2, 3])])
def test_one_number_stands_for_all_axes(value: Any, numbers: list[int]) -> None:
    assert by_axis(value, 3) == numbers


@pytest.mark.parametrize("size", range(1, 16))
def test_an_adaptive_pool_is_a_plain_one_exactly_where_its_cells_are_alike(size: int) -> None:
    x = torch.randn(1, 4, size, dtype=torch.float64)
    for count in range(1, 18):
        expected = functional.adaptive_avg_pool1d(x, count)
        if found := adaptive_windows([size], [count]):
            assert torch.allclose(functional.avg_pool1d(x, *found), expected)
        else:
            plain = (functional.avg_pool1d(x, w, s) for w in range(1, size + 1) for s in range(1, size + 1))
            assert not any(torch.allclose(other, expected) for other in plain if other.shape == expected.shape)
    assert adaptive_windows([size, torch.export.Dim.DYNAMIC], [1, 1]) is None
