from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.quantization.capturing.float_form import float_form, spell_for
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.input_affines import fold_ahead
from qtool.quantization.targets import ORT_CPU


def settled(width: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(width)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.01, 4)
    norm.weight.data.normal_()
    norm.weight.data[0] = 0
    norm.bias.data.normal_()
    return norm


class Heads(nn.Module):
    """Two heads, each with its batch-norm, on pooled features that are read as they are as well."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.norms = nn.ModuleList(settled(8) for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4, bias=False)])
        self.plain = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.heads[0](self.norms[0](x)) + self.heads[1](self.norms[1](x)) + self.plain(x)


class Tokens(nn.Module):
    """A gain and a shift in front of a layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
        self.gain, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() * self.gain - self.shift)


class Star(nn.Module):
    """StarReLU: one gain and one shift behind a square, which is a float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
        self.gain, self.shift = nn.Parameter(torch.tensor([0.9])), nn.Parameter(torch.tensor([-0.4]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gain * self.first(x).relu() ** 2 + self.shift)


def table() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), settled(16), nn.Dropout(0.1), nn.Linear(16, 16, bias=False), nn.LeakyReLU(),
        settled(16), nn.Linear(16, 3),
    )  # fmt: skip


class Gains(nn.Module):
    """Networks without batch-norm: a gain behind an activation, read through padding, pools and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.groups = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.padded, self.pooled, self.most = nn.Conv2d(8, 8, 2), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.row, self.last, self.gain = nn.Conv1d(8, 4, 3), nn.Linear(8, 4), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.gelu(self.first(x)) * 1.7 * self.gain
        wide = self.padded(F.pad(x, (0, 1, 0, 1))) + self.groups(x)
        small = self.pooled(F.avg_pool2d(x, 2)) + self.most(F.max_pool2d(x, 2))
        return wide, small, self.row(x.flatten(2)), self.last(x.mean((2, 3)))


class Stars(nn.Module):
    """StarReLU in front of a convolution of one tap, and of one over rows of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.point, self.last = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 1, bias=False),
            nn.Conv1d(8, 6, 3, groups=2),
        )
        self.gain, self.shift = nn.Parameter(torch.tensor([0.9])), nn.Parameter(torch.tensor([-0.4]))

    def star(self, x: Tensor) -> Tensor:
        return self.gain * x.relu() ** 2 + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.star(self.point(self.star(self.first(x)))).flatten(2))


MODELS = {
    "heads": (Heads, (3, 6, 6)),
    "tokens": (Tokens, (7, 6)),
    "table": (table, (6,)),
    "star": (Star, (7, 6)),
    "gains": (Gains, (3, 8, 8)),
    "stars": (Stars, (3, 6, 6)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True])
def test_in_front_of_layers_it_is_in_their_weights(name: str, train: bool) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(5, *shape)
    graph = float_form(model, x)
    spell_for(ORT_CPU, graph, {}, train=train)
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-4)
    assert {unit.kind for unit in Placement(graph, ORT_CPU).plan().float_units} <= {"pow", "activation", "add"}


class Elsewhere(nn.Module):
    """An affine of the input, one read twice, and one whose layer's weight is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(settled(6) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.norms[0](x)).relu()
        x = self.norms[1](x)
        x = self.layers[1](x) + x
        return self.layers[2](self.layers[2](self.norms[2](x.relu())))


def test_elsewhere_it_stays() -> None:
    torch.manual_seed(0)
    model, x = Elsewhere().eval(), torch.randn(5, 6)
    graph = float_form(model, x)
    spell_for(ORT_CPU, graph, {}, train=False)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)
    assert sum(node.target is torch.ops.aten.mul.Tensor for node in graph.graph.nodes) == 3


class Scaled(nn.Module):
    """Whole numbers, made floats by what scales them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x - 3) * 0.1 if x.dtype == torch.int64 else x / 255.0)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(3, 4, 3), torch.arange(192, dtype=torch.uint8).reshape(1, 3, 8, 8)),
        (nn.Linear(6, 4), torch.arange(30).reshape(5, 6)),
    ],
)
def test_what_makes_floats_of_whole_numbers_stays(layer: nn.Module, x: Tensor) -> None:
    model = Scaled(layer).eval()
    graph = float_form(model, x)
    spell_for(ORT_CPU, graph, {}, train=False)
    torch.testing.assert_close(graph(x), model(x))


class Padded(nn.Module):
    """A shift that a convolution pads with zeros, one that is pooled with them, and a gain below 0 before a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](F.silu(x) * 1.5 + 0.5)
        x = self.convs[1](F.avg_pool2d(F.silu(x) + 0.5, 3, 1, 1))
        return self.convs[2](F.max_pool2d(F.silu(x) * -2, 2))


class PaddedBefore(nn.Module):
    """A shift that is padded with zeros, or pooled with them, before a convolution that pads none."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](F.avg_pool2d(F.silu(x) + 0.5, 3, 1, 1))
        return self.convs[1](F.pad(F.silu(x) + 0.5, (1, 1, 1, 1)))


@pytest.mark.parametrize("kind", [Padded, PaddedBefore])
def test_what_zeros_or_a_maximum_would_tell_stays(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(2, 3, 8, 8)
    graph = float_form(model, x)
    assert not fold_ahead(graph, ORT_CPU)
    torch.testing.assert_close(graph(x), model(x))
