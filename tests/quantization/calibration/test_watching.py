"""Ranges by the error at the network's outputs, against errors that were really made there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hard_nets import hard_transformer, images
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.quantization.calibration.observers import RangeObserver
from qtool.quantization.calibration.watching import SAMPLES, Watch, watch
from qtool.quantization.capturing.float_form import FloatForms
from qtool.quantization.ranges import RangeOptions, estimate
from qtool.quantization.ranges.histogram import Histogram
from qtool.quantization.ranges.network import beyond
from qtool.quantization.ranges.tails import BINS, Tails
from qtool.quantization.stage import convert, quantize
from qtool.recipe import QuantizeConfig


class Prepared:
    """As much of a prepared model as watching reads."""

    def __init__(self, graph: Any, **observers: RangeObserver) -> None:
        self.graph, self.observers = graph, observers


def observer(x: Tensor, *, symmetric: bool = False, bits: int = 4) -> RangeObserver:
    """An observer that has seen ``x``; ranges of least squared error clip a good deal for 4 bits."""
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    made = RangeObserver(torch.uint8, 0, 2**bits - 1, scheme, detailed=True)
    made(x)
    return made


def tails_of(seen: RangeObserver) -> Tails:
    assert seen.histogram.tails is not None
    return seen.histogram.tails


def spiked(samples: int, seed: int = 0) -> Tensor:
    """Samples × 4 channels × 64 positions, the values of the last channel larger and all of one sign."""
    x = torch.randn(samples, 4, 64, generator=torch.Generator().manual_seed(seed))
    x[:, 3] = 2 * x[:, 3].abs()
    return x


def uneven(samples: int, seed: int = 0) -> Tensor:
    """Samples × 4 × 1,024 normal values, of which the first of the last channel is now and then far larger."""
    x = torch.randn(samples, 4, 1024, generator=torch.Generator().manual_seed(seed))
    x[::32, 3, 0] = torch.linspace(6, 12, len(x[::32]))
    return x


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_what_clipping_costs_is_the_square_of_the_error_at_the_output(seed: int, upper: bool) -> None:
    x = spiked(16, seed)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    seen = observer(x if upper else -x)

    def net(value: Tensor) -> Tensor:
        return (seen(value if upper else -value) * weight).sum((1, 2))[:, None]

    assert watch(Prepared(net, x=seen), [x]) is None  # type: ignore[arg-type]
    tails = tails_of(seen)
    assert len(tails.rows) == 16
    for part in (0.0, 0.3, 0.9):
        low, high = (a + part * (b - a) for a, b in ((tails.low, tails.least), (tails.high, tails.most)))
        value = x if upper else -x
        made = ((value.clamp(low, high) - value) * weight).sum((1, 2)).double()
        bin_width = max(tails.most - tails.high, tails.low - tails.least) / BINS
        most = float(weight.abs().sum()) * bin_width  # each value may lie half a bin from its bin's middle
        found = tails.clipped(np.array([low]), np.array([high]))[0]
        rate = float(net(x[:1]).square().mean().rsqrt())  # errors count by the size of the outputs
        expected = math.sqrt(float(made.square().mean()))
        assert math.sqrt(found) == pytest.approx(rate * expected, abs=rate * most)


def test_samples_are_counted_once_also_where_nothing_is_clipped() -> None:
    x = torch.eye(16)  # of which a narrower range is a worse one
    even, spikes = observer(x, bits=8), observer(spiked(16))
    before = even.histogram.state_dict()
    net = Prepared(lambda x, y: spikes(x).sum((1, 2)) + even(y).sum(1), a=even, b=spikes)
    watch(net, [(spiked(16), x)])  # type: ignore[arg-type]
    assert len(tails_of(spikes).rows) == len(tails_of(even).energy) == 16
    assert estimate(even.histogram, "network") == estimate(even.histogram, "output")
    assert even.histogram.state_dict() == before


def test_random_signs_give_the_squares_of_several_outputs() -> None:
    x = spiked(SAMPLES)
    mixer = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    seen = observer(x)
    watch(Prepared(lambda value: F.linear(seen(value).flatten(1), mixer), x=seen), [x])  # type: ignore[arg-type]
    tails = tails_of(seen)
    made = F.linear((x.clamp(tails.low, tails.high) - x).flatten(1), mixer)
    rate = F.linear(x[:1].flatten(1), mixer).square().mean()
    expected = float(made.square().sum(1).mean() / rate)
    assert tails.clipped(np.array([tails.low]), np.array([tails.high]))[0] == pytest.approx(expected, rel=0.5)
    energy = float((x != 0).sum((1, 2)).float().mean() * mixer.square().sum(0).mean() / rate)
    assert np.mean(tails.energy) == pytest.approx(energy, rel=0.1)


def test_zeros_cost_nothing_and_few_of_many_values_tell_what_rounding_costs() -> None:
    x = uneven(32).relu()
    weight = torch.randn(4, 1024, generator=torch.Generator().manual_seed(3))
    seen = observer(x)
    watch(Prepared(lambda value: (seen(value) * weight).sum((1, 2))[:, None], x=seen), [x])  # type: ignore[arg-type]
    rate = float((x[0] * weight).sum()) ** -2
    expected = float((weight.square() * (x != 0)).sum((1, 2)).mean()) * rate
    assert np.mean(tails_of(seen).energy) == pytest.approx(expected, rel=0.05)


def test_the_range_is_the_one_of_least_error_at_the_output() -> None:
    x, errors = uneven(SAMPLES), {}
    for heed in (30.0, 0.0):
        weight = torch.randn(4, 1024, generator=torch.Generator().manual_seed(2))
        weight[3, 0] = heed
        seen = observer(x, bits=8)
        watch(Prepared(lambda value, w=weight, o=seen: (o(value) * w).sum((1, 2))[:, None], x=seen), [x])  # type: ignore[arg-type]
        for method in ("minmax", "output", "network"):
            low, high = estimate(seen.histogram, method)
            scale = (high - low) / 255
            made = torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)
            errors[heed, method] = float(((made - x) * weight).sum((1, 2)).square().mean())
    assert errors[30, "network"] < 0.2 * errors[30, "output"]
    assert errors[30, "network"] < 1.1 * errors[30, "minmax"]
    assert errors[0, "network"] < 1.1 * errors[0, "output"] < 0.8 * errors[0, "minmax"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_range_lies_between_that_of_output_and_min_max(symmetric: bool) -> None:
    x = spiked(32) - 2
    seen = observer(x, symmetric=symmetric)
    watch(Prepared(lambda value: seen(value).sum(2), x=seen), [x])  # type: ignore[arg-type]
    inner, found = (
        estimate(seen.histogram, method, num_levels=16, symmetric=symmetric) for method in ("output", "network")
    )
    least, most = seen.options.balanced(float(x.min()), float(x.max()))
    assert least <= found[0] <= inner[0]
    assert inner[1] <= found[1] <= most
    assert not symmetric or found[0] == -found[1]


def test_a_value_that_is_read_twice_adds_up_what_both_readers_make_of_it() -> None:
    x = spiked(8)
    seen, both = observer(x), observer(x)
    watch(Prepared(lambda value: 3 * seen(value).sum(2), x=seen), [x])  # type: ignore[arg-type]
    watch(Prepared(lambda value: both(value).sum(2) + 2 * both(value).sum(2), x=both), [x])  # type: ignore[arg-type]
    np.testing.assert_allclose(tails_of(both).rows, tails_of(seen).rows, rtol=1e-5, atol=1e-9)


def test_watching_leaves_the_observers_as_they_were() -> None:
    x = spiked(8)
    seen = observer(x)
    before = seen.histogram.state_dict()
    watch(Prepared(lambda value: seen(value).sum(2), x=seen), [x])  # type: ignore[arg-type]
    assert (seen.enabled, seen.watch, seen.histogram.state_dict()) == (True, None, before)
    with pytest.raises(ZeroDivisionError), Watch([seen]):
        raise ZeroDivisionError
    assert (seen.enabled, seen.watch) == (True, None)


def test_how_samples_come_in_batches_makes_no_difference() -> None:
    x, found = spiked(24), []
    for size in (1, 5, 24):
        seen = observer(x)
        watch(Prepared(lambda value, o=seen: o(value).sum(2), x=seen), x.split(size))  # type: ignore[arg-type]
        found.append(np.stack(tails_of(seen).rows))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_gradients_that_are_not_finite_are_not_believed() -> None:
    x = spiked(8)
    seen = observer(x)
    watch(Prepared(lambda value: seen(value).sum(2).mul(0).sqrt(), x=seen), [x])  # type: ignore[arg-type]
    assert seen.histogram.tails is None


def test_without_tails_the_range_is_that_of_output() -> None:
    histogram = Histogram("layer")
    histogram.update(spiked(8))
    assert estimate(histogram, "network") == estimate(histogram, "output")
    histogram.tails = beyond(histogram, RangeOptions())
    assert estimate(histogram, "network") == estimate(histogram, "output")


class Classes(nn.Module):
    """Gives the number of the class alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).argmax(1)


class Rounds(Classes):
    """Its output comes out of integers, whose gradients end there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).argmax(1).float()


@pytest.mark.parametrize("kind", [Classes, Rounds])
def test_a_model_without_gradients_has_the_ranges_of_output_and_says_so(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(32, 16)
    found = {}
    for ranges in ("output", "network"):
        config = QuantizeConfig(ranges=ranges, algorithms=None)
        made = convert(model, config, example=x[:2], calibration=[x])
        found[ranges] = {name: (entry["low"], entry["high"]) for name, entry in made.ranges.items()}
        assert any("ranges: those of 'output', since" in note for note in made.notes) == (ranges == "network")
    assert found["network"] == found["output"]


class Pointed(nn.Module):
    """Heeds one position more than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.linear = nn.Conv1d(4, 4, 1), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x))
        return self.linear(y[:, :, 0] + y.mean(2))


@pytest.mark.parametrize("engine", ["pt2e", "torch.ao"])
def test_both_engines_widen_ranges(engine: str) -> None:
    torch.manual_seed(0)
    model, found = Pointed().eval(), {}
    for ranges in ("output", "network"):
        config = QuantizeConfig(ranges=ranges, algorithms=None, engine=engine)
        made = convert(model, config, example=uneven(2), calibration=[uneven(SAMPLES)])
        found[ranges] = made.ranges["x"]["high"]
    assert found["output"] < 10
    assert found["network"] > 11


def test_a_transformer_whose_channels_stick_out_comes_nearer() -> None:
    model, train, test = hard_transformer(), images(64, 48, 1), images(64, 48, 2)
    del model.layers[2:]
    found, forms = {}, FloatForms(model)
    for ranges in ("minmax", "output", "network"):
        config = QuantizeConfig(ranges=ranges)
        made = quantize(model, config, example=train[:2], calibration=train.split(32), forms=forms)
        with torch.no_grad():
            wanted = model(test)
            error = (made(test) - wanted).square().sum()
        found[ranges] = 10 * math.log10(float(wanted.square().sum() / error))
    assert found["network"] > max(found["minmax"], found["output"]) + 0.5
