"""Maxima over places of what a convolution gives become poolings, of the same values, that are integer in the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.graphs.operators import MAX_POOLS
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


class Read(nn.Module):
    """What a convolution's results are read as, and a layer behind."""

    def __init__(self, axes: int, read: Callable[[Tensor], Tensor], size: int = 6) -> None:
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](16, 32, 1)
        self.read, self.head = read, nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = self.read(torch.relu(self.conv(x)))
        return self.head(values.flatten(1)[:, : self.head.in_features])


def with_places(x: Tensor) -> Tensor:
    values, places = x.max(2)
    return values + places


READS = [
    (1, lambda x: torch.max(x, 2)[0]),
    (1, lambda x: x.max(dim=-1, keepdim=True).values),
    (1, lambda x: F.adaptive_max_pool1d(x, 2)),
    (1, lambda x: F.adaptive_max_pool1d(x.unsqueeze(-1).squeeze(3), 1)),
    (2, lambda x: x.amax((2, 3))),
    (2, lambda x: x.amax(3)),
    (2, lambda x: (x * torch.sigmoid(x)).amax((-1, -2), keepdim=True)),
    (2, lambda x: F.adaptive_max_pool2d(x, 1)),
    (2, lambda x: F.adaptive_max_pool2d(x, (2, 3))),
    (2, lambda x: F.adaptive_max_pool2d(x, (3, 5))),  # of windows that overlap
    (3, lambda x: F.adaptive_max_pool3d(x, 1)),
]


@pytest.mark.parametrize(("axes", "read"), READS)
def test_a_maximum_over_places_is_an_integer_pooling(axes, read) -> None:
    torch.manual_seed(0)
    model, x = Read(axes, read).eval(), torch.randn(2, 16, *(4, 6, 8)[:axes])
    graph = float_form(model, x)
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), atol=1e-5)
    assert sum(node.target in MAX_POOLS for node in graph.graph.nodes) == 1
    plan = Placement(graph, ORT_CPU).plan()
    assert [unit.integer for unit in plan.units if unit.kind == "max_pool"] == [True]


@pytest.mark.parametrize(
    ("axes", "read", "open_axes"),
    [
        (1, lambda x: x.amax(1), ()),  # over channels
        (2, lambda x: x.amax((1, 2, 3)), ()),
        (1, lambda x: x.amax(2), (2,)),  # of an open size
        (1, with_places, ()),  # its places are read too
        (2, lambda x: F.adaptive_max_pool2d(x, (3, 4)), ()),  # 6 columns in 4 cells
        (1, lambda x: torch.softmax(x, 2).amax(2), ()),  # of no convolution's result
    ],
)
def test_other_maxima_stay(axes, read, open_axes) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = (nn.Conv1d, nn.Conv2d)[axes - 1](16, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return read(self.conv(x))

    graph = float_form(Whole().eval(), torch.randn(2, 16, *(4, 6)[:axes]), axes=open_axes)
    assert not any(node.target in MAX_POOLS for node in graph.graph.nodes)
