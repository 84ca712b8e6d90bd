from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import NORMAL
from qtool.quantization.rewrites.scales import fold_scales
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU
from qtool.recipe import QuantizeConfig

PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
SUMS = (aten.add.Tensor, aten.sub.Tensor)


class Scaled(nn.Module):
    """Layers with a product behind them, of which ``write`` is told how it is written."""

    def __init__(self, write: Callable[[Scaled, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.conv, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4, bias=False)
        self.turned = nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.norm = nn.BatchNorm2d(4)
        sizes: tuple[tuple[int, ...], ...] = ((4,), (4,), (), (6, 1, 1))
        self.gain, self.more, self.one, self.of_six = (nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


FOLDED: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "layer scale of a convolution": lambda m, x: x + m.conv(x) * m.gain.reshape(1, -1, 1, 1),
    "in front": lambda m, x: x + m.gain.view(4, 1, 1) * m.conv(x),
    "behind batch-norm": lambda m, x: x + m.norm(m.conv(x)).mul(m.gain[:, None, None]),
    "behind a batch-norm alone": lambda m, x: m.norm(x.relu()) * m.gain[:, None, None],
    "of a linear layer": lambda m, x: m.linear(x.flatten(2).mT) * m.gain,
    "behind a turn": lambda m, x: x + m.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * m.gain.view(4, 1, 1),
    "behind a transposition": lambda m, x: m.linear(x.flatten(2).mT).transpose(1, 2) * m.gain[:, None],
    "behind views": lambda m, x: (m.conv(x).flatten(2) * m.gain[:, None]).flatten(1) * m.one,
    "of a transposed convolution": lambda m, x: m.turned(x) * m.of_six,
    "a number": lambda m, x: x + m.conv(x) * 0.5 / 3,
    "behind ReLU": lambda m, x: m.conv(x).relu() * m.gain.abs().view(4, 1, 1) * 3,
    "behind pooling": lambda m, x: F.max_pool2d(m.conv(x), 2) * m.gain.abs()[:, None, None],
    "a number of heads": lambda m, x: m.linear(x.flatten(2).mT).unflatten(2, (2, 2)).transpose(1, 2) * 0.5,
}  # fmt: skip


def require_folded(net: Callable[[Scaled, Tensor], Tensor], gone: set[object]) -> None:
    torch.manual_seed(0)
    model, x = Scaled(net).eval(), torch.randn(2, 4, 6, 6)
    model.norm.running_mean.normal_()
    model.norm.bias.data.normal_()
    graph = float_form(model, x)
    assert fold_scales(graph)
    assert not {node.target for node in graph.graph.nodes} & gone
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), model(batch))


@pytest.mark.parametrize("name", FOLDED)
def test_a_product_behind_a_layer_is_in_its_weights(name: str) -> None:
    require_folded(FOLDED[name], {*PRODUCTS})


SHIFTED: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "frozen batch-norm": lambda m, x: m.conv(x) * m.gain.view(1, -1, 1, 1) + m.more.view(1, -1, 1, 1),
    "and another": lambda m, x: m.linear(x.flatten(2).mT) + m.gain - m.more,
    "behind a turn": lambda m, x: m.more.view(4, 1, 1) + m.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "of a transposed convolution": lambda m, x: m.turned(x) - m.of_six,
    "behind batch-norm": lambda m, x: m.norm(m.conv(x)) + m.gain[:, None, None],
    "behind a batch-norm alone": lambda m, x: m.norm(x.relu()) + m.gain[:, None, None],
    "a number": lambda m, x: (m.conv(x) + 3) * 0.5,
    "behind ReLU, one below 0": lambda m, x: F.max_pool2d((m.conv(x).relu() * 2 + -m.one.abs()), 2),
    "behind ReLU and a pool": lambda m, x: F.max_pool2d(m.conv(x).relu(), 2) - m.one.abs(),
    "behind a pool": lambda m, x: F.max_pool2d(m.conv(x), 2) + m.gain[:, None, None],
    "what a layer is taken from": lambda m, x: 1 - m.conv(x),
    "behind what a batch-norm is taken from": lambda m, x: m.gain[:, None, None] - m.norm(m.conv(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIFTED)
def test_a_sum_behind_a_layer_is_in_its_bias(name: str) -> None:
    require_folded(SHIFTED[name], {*PRODUCTS, *SUMS})


LEFT: dict[str, Callable[[Scaled, Tensor], Tensor]] = {
    "behind an activation": lambda m, x: m.conv(x).sigmoid() * 0.5,
    "behind ReLU, below zero": lambda m, x: m.conv(x).relu() * -0.5,
    "a sum behind ReLU": lambda m, x: m.conv(x).relu() - m.gain.abs().view(4, 1, 1),
    "one above 0 behind ReLU": lambda m, x: m.conv(x).relu() + m.one.abs(),
    "behind a leaky ReLU": lambda m, x: F.leaky_relu(m.conv(x)) - m.one.abs(),
    "what ReLU is taken from": lambda m, x: 1 - m.conv(x).relu(),
    "what a value that is read twice is taken from": lambda m, x: (1 - (y := m.conv(x))) * y,
    "a number for each place": lambda m, x: m.conv(x[..., :4, :4]) + m.gain,
    "a value that is read twice": lambda m, x: (y := m.conv(x)) * 0.5 + y,
    "along another axis": lambda m, x: m.conv(x[..., :4]) * m.gain,
    "channels that a view splits": lambda m, x: m.conv(x).reshape(-1, 2, 2, 36) * m.gain[:2, None, None],
    "channels that are pooled": lambda m, x: F.max_pool2d(m.linear(x.permute(0, 2, 3, 1)), (2, 1)) * m.gain.abs(),
    "a divisor of the layer": lambda m, x: 1 / m.conv(x),
    "a computed factor": lambda m, x: m.conv(x) * x.mean((2, 3), keepdim=True),
    "a size that is open": lambda m, x: m.conv(x) * x.shape[0],
    "weights that are read twice": lambda m, x: m.conv(x) * 0.5 + m.conv(x.relu()),
    "a result that grows": lambda m, x: m.linear(x.mean((2, 3))) * m.gain.view(4, 1, 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_scale_of_a_layer_stays(name: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(LEFT[name]).eval(), torch.randn(2, 4, 6, 6)
    graph = float_form(model, x)
    assert not fold_scales(graph)
    torch.testing.assert_close(graph(x), model(x))


def test_what_is_known_of_the_channels_is_scaled_too() -> None:
    torch.manual_seed(0)
    model = Scaled(FOLDED["behind batch-norm"]).eval()
    graph = float_form(model, torch.randn(2, 4, 6, 6))
    (layer,) = fold_scales(graph)
    mean, deviation = layer.meta[NORMAL]
    torch.testing.assert_close(mean, model.norm.bias * model.gain)
    torch.testing.assert_close(deviation, (model.norm.weight * model.gain).abs())


def test_a_difference_is_a_sum_where_a_layer_gives_what_is_taken_away() -> None:
    torch.manual_seed(0)
    model, x = Scaled(lambda m, x: x.relu() - m.conv(x)).eval(), torch.randn(2, 4, 6, 6)
    graph = float_form(model, x)
    fold_scales(graph)
    assert [node.target for node in graph.graph.nodes if node.target in SUMS] == [aten.add.Tensor]
    torch.testing.assert_close(graph(x), model(x))


def test_training_goes_on_with_the_product_folded() -> None:
    torch.manual_seed(0)
    model, x = Scaled(FOLDED["behind batch-norm"]), torch.randn(4, 4, 6, 6)
    graph = capture(model, x, train=True)
    assert len(fold_scales(graph)) == 1
    torch.testing.assert_close(graph(x), model(x))
    assert all(value.requires_grad for value in graph.parameters())


def test_a_residual_block_with_layer_scale_is_integer() -> None:
    torch.manual_seed(0)
    model, x = Scaled(FOLDED["behind batch-norm"]).eval(), torch.randn(2, 4, 6, 6)
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), model, nn.Conv2d(4, 4, 1))
    plan = quantize(net.eval(), QuantizeConfig(), example=x, calibration=[x]).plan
    assert [(unit.kind, unit.integer) for unit in plan.units] == [
        ("conv", True), ("conv", True), ("add", True), ("conv", True)
    ]  # fmt: skip
    assert any(not unit.integer for unit in Placement(float_form(net, x), ORT_CPU).plan().units)


class Frozen(nn.Module):
    """Batch-norm as detectors freeze it: a product and a sum with what buffers come to."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.reshape(1, -1, 1, 1) * (self.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_a_frozen_batch_norm_is_in_its_convolution(target: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), Frozen(4), nn.ReLU()) for _ in range(2)]
    net, x = nn.Sequential(*layers, nn.Conv2d(4, 4, 1)).eval(), torch.randn(2, 4, 6, 6)
    quantized = quantize(net, QuantizeConfig(target=target), example=x, calibration=[x])
    assert [(unit.kind, unit.integer) for unit in quantized.plan.units] == [("conv", True)] * 3


@pytest.mark.parametrize("engine", ["pt2e", "torch.ao"])
def test_a_batch_norm_behind_the_factor_is_folded_into_the_layer_too(engine: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(lambda m, x: m.norm(m.conv(x) * 0.5).relu()), torch.randn(8, 4, 6, 6)
    model(x)  # statistics that are the data's
    form = quantize(model.eval(), QuantizeConfig(engine=engine), example=x, calibration=[x])
    if engine == "pt2e":
        assert [(unit.kind, unit.integer) for unit in form.plan.units] == [("conv", True)]
        assert aten.batch_norm.default not in {node.target for node in form.graph.graph.nodes}
    with torch.no_grad():
        assert float((form(x) - model(x)).abs().max()) < 0.03


def uneven(rank: int) -> nn.Sequential:
    """A batch-norm behind ReLU, whose channels differ by five orders of magnitude and have factors of both signs."""
    layers = (nn.Linear(6, 16), nn.Linear(16, 3)) if rank == 1 else (nn.Conv2d(6, 16, 3), nn.Conv2d(16, 3, 3))
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[rank](16, momentum=None)
    between = [nn.ReLU()] if rank == 1 else [nn.LeakyReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(layers[0], *between, norm, layers[1])
    sizes = torch.logspace(-3, 2, 16)
    with torch.no_grad():
        for value in layers[0].parameters():
            value *= sizes.reshape(-1, *[1] * (value.dim() - 1))
        norm.weight.copy_(torch.linspace(-1, 1.5, 16).where(torch.arange(16) != 3, torch.zeros(16)))
    return model


@pytest.mark.parametrize("rank", [1, 2])
def test_channels_are_as_even_as_the_batch_norm_behind_makes_them(rank: int) -> None:
    torch.manual_seed(0)
    model, x = uneven(rank), torch.randn(64, *[[6], [6, 8, 8]][rank - 1])
    model(x)  # statistics that are the data's
    form = quantize(model.eval(), QuantizeConfig(effort="fast"), example=x, calibration=[x])
    assert all(unit.integer for unit in form.plan.units)
    with torch.no_grad():
        expected = model(x)
        assert float((form(x) - expected).square().sum() / expected.square().sum()) < 0.01
