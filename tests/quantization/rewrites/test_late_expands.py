"""Layers of learned queries are constants; what depends on the input, or mixes samples, is computed as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


class Pooled(nn.Module):
    """Attention pooling: a learned query looks at all places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place = nn.Parameter(torch.randn(1, 2, 16)), nn.Parameter(torch.randn(2, 16))
        self.norm, self.q, self.kv, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = self.norm(self.query.expand(len(x[:, 0]), -1, -1) + self.place)
        q = self.q(query).reshape(x.shape[0], 2, 4, 4).transpose(1, 2)
        k, v = self.kv(x).reshape(x.shape[0], -1, 2, 4, 4).permute(2, 0, 3, 1, 4)
        pooled = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((pooled + query).flatten(1))


def forms(model: nn.Module, x: Tensor) -> list[object]:
    """The operators of the float form, which computes for any batch what the model does."""
    graph = float_form(model.eval(), x)
    with torch.no_grad():
        for batch in (x, x[:1], torch.cat([x, x])):
            torch.testing.assert_close(graph(batch), model(batch))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


def test_a_learned_query_is_projected_once() -> None:
    torch.manual_seed(0)
    model = Pooled()
    assert forms(model, X).count(aten.linear.default) == 2
    plan = Placement(float_form(model, X), ORT_CPU).plan()
    assert [unit.name for unit in plan.integer_units] == ["kv", "head"]


class Turned(nn.Module):
    """What is the same for each sample, until it goes with the input or over the samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.start, self.layer = kind, nn.Parameter(torch.randn(1, 5, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(x.shape[0], -1, -1)
        if self.kind == "input":
            return self.layer(start + x)
        if self.kind == "samples":
            return self.layer(start.transpose(0, 1)).mean(0) + x[:, 0]
        if self.kind == "flat":
            return self.layer(start.reshape(-1, 16)).reshape(x.shape) + x
        return self.layer(start) * start + x


@pytest.mark.parametrize(("kind", "layers"), [("input", 1), ("samples", 1), ("flat", 1), ("alone", 0)])
def test_what_differs_between_samples_stays(kind: str, layers: int) -> None:
    torch.manual_seed(0)
    assert forms(Turned(kind), X).count(aten.linear.default) == layers


class Sines(nn.Module):
    """Positions counted in a mask of ones for each sample, their sines, and a convolution of these."""

    def __init__(self, along: int = 1) -> None:
        super().__init__()
        self.along, self.first, self.project, self.head = along, nn.Conv2d(3, 8, 1), nn.Conv2d(6, 8, 1), nn.Linear(8, 4)

    def places(self, batch: int) -> Tensor:
        mask = ~torch.zeros(batch, 5, 7).to(torch.bool)
        rows, columns = (mask.cumsum(axis, dtype=torch.float32) for axis in (self.along, 2))
        angles = (rows / (rows[:, -1:] + 1e-6))[..., None] * torch.arange(1, 4)
        turned = torch.stack((angles[..., 0::3].sin(), angles[..., 1::3].cos()), dim=4).flatten(3)
        return torch.cat([turned, turned + 1, columns[..., None], columns[..., None].relu()], 3).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + self.project(self.places(x.shape[0]))
        return self.head(y.relu().mean((2, 3)))


@pytest.mark.parametrize(("along", "kept"), [(1, False), (0, True)])
def test_positions_in_a_mask_of_ones_are_counted_once(along: int, kept: bool) -> None:
    torch.manual_seed(0)
    operators = forms(Sines(along), torch.randn(3, 3, 5, 7))
    assert (aten.cumsum.default in operators) == kept
    assert (aten.sin.default in operators) == kept
    assert operators.count(aten.conv2d.default) == 1 + kept
