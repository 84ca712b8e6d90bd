"""Output-error ranges against their definition: errors put into one channel, and read where the layers behind end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hard_nets import hard_mobilenet, images
from torch import Tensor, nn

from qtool.evaluate import sqnr_db
from qtool.graphs.edits import copied
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.gains import channel_gains
from qtool.quantization.placement import Placement
from qtool.quantization.quantizers.qparams import affine_qparams
from qtool.quantization.ranges import estimate
from qtool.quantization.ranges.histogram import HALF_BINS, WEIGHT, Histogram, count_numpy, count_torch
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QuantizeConfig

BATCHES = [images(24), images(8, seed=1)]


class Read(nn.Module):
    """A convolution whose output two others read, one of them behind a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.last = nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.depthwise(y), self.last(y + self.side(x))


def gains_of(model: nn.Module, example: Tensor):
    graph = copied(float_form(model.eval(), example))
    return channel_gains(graph, Placement(graph, get_target("ort-cpu")))


def test_a_gain_is_the_square_of_what_a_unit_error_makes_of_all_readers_outputs() -> None:
    torch.manual_seed(0)
    model, x = Read(), torch.randn(2, 3, 9, 9)
    found = gains_of(model, x)["first"]
    squares = []
    for channel in range(6):
        error = torch.zeros(1, 6, 9, 9)
        error[0, channel, 4, 4] = 1.0
        with torch.no_grad():
            parts = (layer(error) - layer(torch.zeros_like(error)) for layer in (model.depthwise, model.last))
            squares.append(sum(float(part.square().sum()) for part in parts))
    assert found.axis == 0
    np.testing.assert_allclose(found.values.numpy(), np.array(squares) / np.mean(squares), rtol=1e-4)


def test_gains_are_known_from_the_input_to_the_pooling_and_of_linear_layers_along_their_last_axis() -> None:
    found = gains_of(hard_mobilenet(), BATCHES[0][:2])
    assert {"x", "stem.0", "blocks.1.add", "head.0"} <= set(found)
    assert "linear" not in found
    rows = gains_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 5, 4))
    assert all(gain.axis == 1 for gain in rows.values())


def test_padding_with_zeros_keeps_the_gains_of_what_reads_it() -> None:
    inside = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6))
    outside = nn.Sequential(inside[0], nn.ZeroPad2d(1), nn.Conv2d(6, 6, 3, groups=6))
    outside[2].load_state_dict(inside[1].state_dict())
    wanted, found = (gains_of(model, torch.randn(2, 3, 9, 9))["0"] for model in (inside, outside))
    assert torch.equal(found.values, wanted.values)


class Moved(nn.Module):
    """A layer norm over 5 × 4 rows of 6 channels that a linear layer reads behind a move."""

    def __init__(self, move: Callable[[Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.norm, self.linear, self.move = nn.LayerNorm(6), nn.Linear(width, 7), move

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.move(self.norm(x)))


KEEPING = {
    "reshape": lambda x: x.reshape(-1, 20, 6),
    "rows": lambda x: x.reshape(-1, 6),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "select": lambda x: x[:, 0],
    "slice": lambda x: x[:, :, 1:3],
    "two of them": lambda x: x[:, 1:].transpose(1, 2).flatten(1, 2),
}


@pytest.mark.parametrize("move", KEEPING.values(), ids=KEEPING)
def test_gains_are_known_before_what_moves_rows_of_channels(move: Callable[[Tensor], Tensor]) -> None:
    model = Moved(move)
    found = gains_of(model, torch.randn(2, 5, 4, 6))["norm"]
    squares = model.linear.weight.detach().double().square().sum(0)
    assert found.axis == 2
    torch.testing.assert_close(found.values, squares / squares.mean())


@pytest.mark.parametrize("move", [lambda x: x.permute(0, 3, 1, 2), lambda x: x.transpose(1, 3)])
def test_gains_are_those_of_the_axis_that_channels_came_from(move: Callable[[Tensor], Tensor]) -> None:
    model = Moved(move)
    model.linear = nn.Conv2d(6, 7, 1)
    found = gains_of(model, torch.randn(2, 5, 4, 6))["norm"]
    squares = model.linear.weight.detach().double().square().sum((0, 2, 3))
    assert found.axis == 2
    torch.testing.assert_close(found.values, squares / squares.mean())


@pytest.mark.parametrize("move", [lambda x: x.flatten(2), lambda x: x.transpose(2, 3)[..., :5], lambda x: x[..., :3]])
def test_none_are_known_before_what_breaks_rows_up(move: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 5, 6, 6)
    assert "norm" not in gains_of(Moved(move, move(x).shape[-1]), x)


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_what_float_operators_make_is_counted_by_its_readers_gains(target: str) -> None:
    torch.manual_seed(0)
    model, x = Moved(lambda x: x[:, 0]).eval(), torch.randn(8, 5, 4, 6)
    config = QuantizeConfig(target=target, ranges="output", algorithms=None)
    made = quantize(model, config, example=x, calibration=[x])
    expected = Histogram("norm")
    squares = model.linear.weight.detach().double().square().sum(0)
    expected.weigh(2, squares / squares.mean())
    expected.update(model.norm(x).detach())
    found = Histogram.from_state(made.ranges["norm"]["observed"])
    np.testing.assert_allclose(found.counts, expected.counts, atol=8)  # what is moved is seen again, and counts 1
    assert found.total > 1000 * x.numel()


@pytest.mark.parametrize("count", [count_numpy, count_torch])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_value_counts_by_the_weight_of_its_channel(axis: int, count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.quantization.ranges.histogram.count_numpy", count)
    x = torch.randn(3, 5, 4, 6).relu()
    weights = torch.rand(x.shape[axis + 1]) + 0.5
    weights /= weights.mean()
    weighed = Histogram("layer")
    weighed.weigh(axis, weights)
    weighed.update(x)
    parts = (weights.double() * WEIGHT).round().long()
    expected, zeros = np.zeros(2 * HALF_BINS, np.int64), 0
    for index, part in enumerate(parts.tolist()):
        values = x.select(axis + 1, index).numpy().ravel()
        bins = np.floor(values.astype(np.float64) / weighed.bin_width).astype(int) + HALF_BINS
        np.add.at(expected, bins, part)
        zeros += part * int((values == 0).sum())
    np.testing.assert_array_equal(weighed.counts, expected)
    assert weighed.num_zeros == zeros
    assert (weighed.minimum, weighed.maximum) == (float(x.min()), float(x.max()))


def test_the_range_is_narrowed_as_far_as_the_readers_care() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, 8, 8)
    x[:, 3] *= 40
    for gain in (1e-3, 1.0, 30.0):
        weights = torch.tensor([1.0, 1.0, 1.0, gain])
        histogram = Histogram("layer")
        histogram.weigh(0, weights / weights.mean())
        histogram.update(x)

        def error(low: float, high: float, weights: Tensor = weights) -> float:
            scale, zero_point = affine_qparams(low, high)
            made = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
            return float((weights * (x - made).square().mean((0, 2, 3))).sum())

        low, high = estimate(histogram, "output")
        tried = [error(low0, high0) for low0 in -np.geomspace(2, 160, 60) for high0 in np.geomspace(2, 160, 60)]
        assert error(low, high) < 1.01 * min(tried)


def test_the_output_comes_nearer_than_with_ranges_of_least_squared_error() -> None:
    model, test = hard_mobilenet(), images(128, seed=9)
    found = {}
    for ranges in ("mse", "output"):
        config = QuantizeConfig(ranges=ranges, algorithms=("bias",))
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES)
        with torch.no_grad():
            found[ranges] = sqnr_db(model(test), quantized(test))
    assert found["output"] > found["mse"] + 0.5


class TimeFirst(nn.Module):
    """Layers over time × batch × features, as torch's attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.transpose(0, 1))
        steps, batch, features = y.shape
        return self.last(y.reshape(steps * batch, features)).reshape(steps, batch, features)


def test_a_batch_as_large_as_a_layer_is_no_batch_of_that_size() -> None:
    torch.manual_seed(0)
    config = QuantizeConfig(ranges="output", algorithms=None)
    model, x = TimeFirst().eval(), torch.randn(9, 5, 4)
    made = quantize(model, config, example=x[:4], calibration=[x[:4]])
    assert sqnr_db(model(x), made(x)) > 15  # nine samples, some beyond the range that four have


def test_a_pool_to_the_size_that_calibration_images_have_still_pools_others_where_their_size_is_open() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(144, 3)
    model, config = nn.Sequential(*layers).eval(), QuantizeConfig(ranges="minmax", algorithms=None, dynamic_axes=(2, 3))
    small, large = torch.randn(4, 3, 6, 6), torch.randn(4, 3, 12, 12)
    made = quantize(model, config, example=small, calibration=[small])
    assert sqnr_db(model(small), made(small)) > 25
    assert sqnr_db(model(large), made(large)) > 25
