"""The estimators against numpy on the data itself, and against brute-force searches of the same criterion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool import recipe
from qtool.errors import QtoolError, UsageError
from qtool.quantization.quantizers.qparams import affine_qparams, symmetric_qparams
from qtool.quantization.ranges import ESTIMATORS, RangeOptions, estimate, weight_range
from qtool.quantization.ranges.density import Density, boundaries, grid
from qtool.quantization.ranges.entropy import Divergence
from qtool.quantization.ranges.histogram import HALF_BINS, Histogram
from qtool.quantization.ranges.mse import SquaredError

SEARCHED = ("mse", "entropy")
COSTS = {"mse": SquaredError, "entropy": Divergence}


def samples(kind: str, num: int = 39_900, seed: int = 0) -> torch.Tensor:
    """Values as activations have them, in samples small enough for every value to be counted."""
    torch.manual_seed(seed)
    x = torch.randn(num)
    values = {
        "gauss": x,
        "laplace": x * torch.randn(num).abs(),
        "relu": torch.relu(x * 2 - 1),
        "relu6": (x * 3).clamp(0, 6),
        "hardswish": torch.nn.functional.hardswish(x * 2),
        "negative": -torch.relu(x),
        "outliers": torch.where(torch.rand(num) < 3e-4, x * 40, x),
        "lopsided": torch.cat([x[: num // 2] - 8, x[num // 2 :] * 0.3 + 3]),
    }
    return values[kind].reshape(-1, 100)


def histogram_of(x: torch.Tensor) -> Histogram:
    histogram = Histogram("conv1")
    histogram.update(x)
    return histogram


def quantized(x: torch.Tensor, low: float, high: float, qmin: int = 0, qmax: int = 255) -> torch.Tensor:
    scale, zero_point = affine_qparams(low, high, qmin, qmax)
    return (torch.clamp(torch.round(x / scale) + zero_point, qmin, qmax) - zero_point) * scale


def squared_error(x: torch.Tensor, low: float, high: float) -> float:
    return float((quantized(x, low, high) - x).double().square().sum())


def candidates(histogram: Histogram, num: int) -> list[tuple[float, float]]:
    """Pairs of ends, narrowed evenly from min-max: an ordering that the search does not use."""
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    lows = np.linspace(low / num, low, num) if low else [0.0]
    highs = np.linspace(high / num, high, num) if high else [0.0]
    return [(float(a), float(b)) for a in lows for b in highs]


def cost_of(method: str, histogram: Histogram, ranges: list[tuple[float, float]], **options) -> np.ndarray:
    cost = COSTS[method](Density.of(histogram), RangeOptions(**options))
    ends = np.array(ranges)
    return np.concatenate([cost(*part.T) for part in np.array_split(ends, 1 + len(ranges) // 500)])


KINDS = ["gauss", "laplace", "relu", "relu6", "hardswish", "negative", "outliers", "lopsided"]


def test_the_recipe_offers_every_estimator():
    assert set(recipe.RANGES) == set(ESTIMATORS)


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_lie_within_what_was_seen_and_keep_their_zero_end(method, kind):
    histogram = histogram_of(samples(kind))
    low, high = estimate(histogram, method)
    assert histogram.minimum <= low <= 0 <= high <= histogram.maximum
    assert (low == 0) == (histogram.minimum == 0)
    assert (high == 0) == (histogram.maximum == 0)
    assert (low, high) == estimate(histogram, method)  # the same again
    least, most = estimate(histogram, method, symmetric=True)
    assert least == -most
    assert 0 < most <= max(-histogram.minimum, histogram.maximum)


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 3.0, -0.25, 1e-30])
def test_a_constant_keeps_its_value(method, value):
    low, high = estimate(histogram_of(torch.full((3, 5), value)), method)
    assert min(low, 0) == pytest.approx(min(np.float32(value), 0), rel=2e-3)
    assert max(high, 0) == pytest.approx(max(np.float32(value), 0), rel=2e-3)


@settings(max_examples=15)
@given(st.integers(-80, 80), st.sampled_from(KINDS), st.sampled_from(sorted(ESTIMATORS)))
def test_ranges_scale_with_the_unit(power, kind, method):
    x = samples(kind, 3000)
    low, high = estimate(histogram_of(x), method)
    assert estimate(histogram_of(x * 2.0**power), method) == (low * 2.0**power, high * 2.0**power)


@pytest.mark.parametrize("kind", ["gauss", "hardswish", "lopsided"])
@pytest.mark.parametrize("method", ESTIMATORS)
def test_mirrored_data_is_served_as_well(method, kind):
    x = samples(kind)
    low, high = estimate(histogram_of(-x), method)
    if method == "entropy":
        here, there = cost_of(method, histogram_of(x), [(-high, -low), estimate(histogram_of(x), method)])
        assert here == pytest.approx(there, rel=0.3)
    else:
        assert squared_error(-x, low, high) == pytest.approx(
            squared_error(x, *estimate(histogram_of(x), method)), rel=0.02
        )


# min-max and percentile


def test_minmax_is_what_was_seen():
    x = samples("lopsided")
    assert estimate(histogram_of(x)) == (x.min().item(), x.max().item())
    assert estimate(histogram_of(x), symmetric=True) == (x.min().item(), -x.min().item())


@pytest.mark.parametrize("percentile", [90.1, 99.1, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_percentile_equals_numpy_to_a_bin(kind, percentile):
    x, histogram = samples(kind), histogram_of(samples(kind))
    two_signs = histogram.minimum < 0 < histogram.maximum
    tail = (100 - percentile) / (2 if two_signs else 1)
    low, high = np.percentile(x.double(), [tail, 100 - tail], method="inverted_cdf")
    found = estimate(histogram, "percentile", percentile=percentile)
    assert found[0] == pytest.approx(low if histogram.minimum < 0 else 0.0, abs=1.01 * histogram.bin_width)
    assert found[1] == pytest.approx(high if histogram.maximum > 0 else 0.0, abs=1.01 * histogram.bin_width)
    magnitude = np.percentile(x.double().abs(), percentile, method="inverted_cdf")
    symmetric = estimate(histogram, "percentile", percentile=percentile, symmetric=True)
    assert symmetric[1] == pytest.approx(magnitude, abs=1.01 * histogram.bin_width)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_values_are_minmax(kind):
    histogram = histogram_of(samples(kind))
    assert estimate(histogram, "percentile", percentile=100.0) == (histogram.minimum, histogram.maximum)


def test_the_moving_average_is_of_each_samples_extremes_whatever_the_batches():
    x = torch.randn(130, 3, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(130.0)[:, None, None] / 50
    low, high = x.flatten(1).amin(1).clamp(max=0.0).double().numpy(), x.flatten(1).amax(1).double().numpy()
    wanted = np.array([low[:100].mean(), high[:100].mean()])
    for pair in zip(low[100:], high[100:], strict=True):
        wanted = 0.99 * wanted + 0.01 * np.array(pair)
    for size in (130, 32, 1):
        histogram = Histogram("x")
        for batch in x.split(size):
            histogram.update(batch)
        np.testing.assert_allclose(estimate(histogram, "moving-average"), wanted, rtol=1e-9)
        restored = Histogram.from_state(histogram.state_dict())
        assert estimate(restored, "moving-average") == estimate(histogram, "moving-average")


def test_the_moving_average_is_not_ruled_by_one_sample():
    x = torch.rand(50, 8)
    x[7, 3] = 1000.0
    histogram = Histogram("x")
    histogram.update(x)
    low, high = estimate(histogram, "moving-average")
    assert low == 0.0  # values are positive, and zero stays exact
    assert 20 < high < 22


def test_percentile_interpolates_within_a_bin():
    histogram = histogram_of(torch.linspace(0, 4095, 8191).reshape(-1, 1))  # two values per bin of width 1
    assert histogram.bin_width == 1.0
    assert estimate(histogram, "percentile", percentile=50.0)[1] == pytest.approx(8191 / 4, abs=1e-9)


# mse


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_levels", [256, 255, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_squared_error_is_that_of_values_spread_over_their_bins(kind, num_levels, symmetric):
    histogram = histogram_of(samples(kind))
    density, options = Density.of(histogram), RangeOptions(num_levels=num_levels, symmetric=symmetric)
    low, high = options.balanced(min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
    fine = (np.arange(400) + 0.5) / 400
    x = density.left[:, None] + (density.right - density.left)[:, None] * fine
    for part_low, part_high in ((1.0, 1.0), (0.9, 0.7), (0.4, 0.4), (0.05, 0.1)):
        ends = (low * part_low, high * (part_low if symmetric else part_high))
        scale, zero_point = (float(v[0]) for v in grid(*(np.array([end]) for end in ends), options))
        rounded = (np.clip(np.round(x / scale) + zero_point, 0, num_levels - 1) - zero_point) * scale
        expected = (density.count * ((x - rounded) ** 2).mean(axis=1)).sum()
        found = SquaredError(density, options)(*(np.array([end]) for end in ends))[0]
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_as_good_as_brute_force_on_the_data(kind):
    x, histogram = samples(kind), histogram_of(samples(kind))
    ranges = candidates(histogram, 60)
    promising = np.argsort(cost_of("mse", histogram, ranges))[:40]
    best = min(squared_error(x, *ranges[index]) for index in promising)
    found = squared_error(x, *estimate(histogram, "mse"))
    assert found <= 1.01 * best
    assert found <= squared_error(x, histogram.minimum, histogram.maximum)


def test_brute_force_over_all_pairs_agrees_with_the_preselection():
    x, histogram = samples("laplace"), histogram_of(samples("laplace"))
    best = min(squared_error(x, *ends) for ends in candidates(histogram, 25))
    assert squared_error(x, *estimate(histogram, "mse")) <= 1.01 * best


def test_fewer_levels_clip_more():
    histogram = histogram_of(samples("laplace"))
    ends = [estimate(histogram, "mse", num_levels=levels)[1] for levels in (256, 64, 16, 4)]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < 0.5 * ends[0]


# entropy


def naive_divergence(histogram: Histogram, low: float, high: float, num_levels: int) -> float:
    """KL(P ‖ Q) by the book: loops over bins, levels found by rounding the middle of each bin."""
    width = histogram.bin_width
    counts = {k - HALF_BINS: float(c) for k, c in enumerate(histogram.counts) if c}
    counts[0] = counts.get(0, 0.0) - histogram.num_zeros
    first, last = math.floor(histogram.minimum / width), math.floor(histogram.maximum / width)
    start, stop = max(math.floor(low / width), min(first, 0)), min(math.floor(high / width), max(last, 0))
    p = {b: counts.get(b, 0.0) for b in range(start, stop + 1)}
    inside = dict(p)
    for b, count in counts.items():
        if not start <= b <= stop:
            p[start if b < start else stop] += count
    scale = (high - low) / (num_levels - 1)
    zero_point = round(-low / scale)
    cells: dict[int, list[int]] = {}
    for b in p:
        edge = (b + 0.5) * width / scale + zero_point
        level = min(max(math.floor(edge + 0.5), 0), num_levels - 1)
        cells.setdefault(level, []).append(b)
    q = dict.fromkeys(p, 0.0)
    for bins in cells.values():
        occupied = [b for b in bins if p[b] > 0]
        for b in occupied:
            q[b] = sum(inside[c] for c in bins) / len(occupied)
    total_p, total_q = sum(p.values()), sum(q.values())
    if any(p[b] > 0 and q[b] == 0 for b in p):
        return math.inf
    return sum(p[b] / total_p * math.log(p[b] / total_p * total_q / q[b]) for b in p if p[b] > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_the_one_by_the_book(kind):
    histogram = histogram_of(samples(kind, 3000))
    rng = np.random.default_rng(0)
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    ends = [(low * a, high * b) for a, b in rng.uniform(0.5, 1.0, (30, 2))] + [(low, high)]
    found = cost_of("entropy", histogram, ends, num_levels=64)
    expected = [naive_divergence(histogram, *pair, 64) for pair in ends]
    assert np.isfinite(expected).sum() >= 1
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_as_good_as_brute_force(kind):
    histogram = histogram_of(samples(kind))
    best = cost_of("entropy", histogram, candidates(histogram, 90)).min()
    found = cost_of("entropy", histogram, [estimate(histogram, "entropy")])[0]
    assert found <= 1.1 * best + 1e-4


@pytest.mark.parametrize("kind", ["laplace", "outliers"])
def test_entropy_does_not_fall_back_to_minmax(kind):
    histogram = histogram_of(samples(kind, 400_000))
    low, high = estimate(histogram, "entropy")
    assert high - low < 0.95 * (histogram.maximum - histogram.minimum)


def test_entropy_keeps_the_spike_that_a_clamp_leaves():
    assert estimate(histogram_of(samples("relu6")), "entropy")[1] == pytest.approx(6.0, rel=2e-3)


def test_a_narrow_range_is_not_tried():
    histogram = histogram_of(samples("gauss"))
    least = 255 * histogram.bin_width
    assert np.isinf(cost_of("entropy", histogram, [(-least / 2, least / 2)]))[0]


# options


@pytest.mark.parametrize("options", [{"num_levels": 2}, {"percentile": 10.0}, {"percentile": 101.0}])
def test_a_bad_option_is_refused(options):
    with pytest.raises(UsageError):
        estimate(histogram_of(torch.ones(1, 1)), "mse", **options)


def test_a_misspelt_method_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"got 'entrpy'; did you mean 'entropy'\?"):
        estimate(histogram_of(torch.ones(1, 1)), "entrpy")


def test_boundaries_lie_half_way_between_levels():
    scale, zero_point = grid(np.array([-1.0]), np.array([3.0]), RangeOptions(num_levels=5))
    assert (scale[0], zero_point[0]) == (1.0, 1.0)
    np.testing.assert_array_equal(boundaries(scale, zero_point, 5), [[-0.5, 0.5, 1.5, 2.5]])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 6.0), (-0.375, 5.2), (-4.0, 0.0)])
def test_the_grid_that_is_searched_is_the_one_that_runs(low, high):
    scale, zero_point = grid(np.array([low]), np.array([high]), RangeOptions())
    assert affine_qparams(low, high) == (pytest.approx(scale[0]), zero_point[0])
    signed, symmetric = grid(np.array([-3.0]), np.array([3.0]), RangeOptions(symmetric=True))
    assert (signed[0], symmetric[0]) == (pytest.approx(symmetric_qparams(3.0)), 128)


def test_the_outermost_bins_end_at_the_extremes():
    density = Density.of(histogram_of(torch.tensor([[-1.3, 0.0, 0.0, 5.1]])))
    assert (density.left[0], density.right[-1]) == (np.float32(-1.3), np.float32(5.1))
    assert density.count.sum() == 2  # zeros are none of them
    spike = Density.of(histogram_of(samples("relu6")))
    assert spike.right[-1] == 6.0
    assert spike.left[-1] == pytest.approx(6.0, abs=1e-4 * spike.width)


# weights


ENDS = [(-127, 127), (-7, 7), (-8, 7)]


def weight_error(weight: torch.Tensor, end: torch.Tensor, qmin: int, qmax: int) -> torch.Tensor:
    """Squared error by channel, where ``end`` is −8 steps, or as many as there are on both sides."""
    scale = end / qmin if qmin == -8 else end.abs() / qmax
    scale = scale.reshape(-1, *[1] * (weight.ndim - 1))
    rounded = torch.clamp(torch.round(weight / scale), qmin, qmax) * scale
    return (rounded - weight).double().square().flatten(1).sum(1)


def farthest(weight: torch.Tensor) -> torch.Tensor:
    rows = weight.flatten(1)
    return rows.gather(1, rows.abs().argmax(1, keepdim=True))[:, 0]


def conv_weight(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape) * torch.logspace(-3, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize("shape", [(8, 16, 3, 3), (12, 1, 3, 3), (10, 40)])
@pytest.mark.parametrize(("qmin", "qmax"), ENDS)
def test_mse_of_weights_is_as_good_as_brute_force(shape, qmin, qmax):
    weight = conv_weight(*shape)
    largest = farthest(weight)
    torch.testing.assert_close(weight_range(weight, 0), largest, rtol=0, atol=0)
    end = weight_range(weight, 0, "mse", qmin, qmax)
    found = weight_error(weight, end, qmin, qmax)
    parts = torch.linspace(0.2, 1, 500)
    tried = torch.stack([weight_error(weight, largest * part, qmin, qmax) for part in torch.cat([parts, -parts])])
    assert (found <= weight_error(weight, largest, qmin, qmax) * (1 + 1e-6)).all()
    assert found.sum() <= 1.03 * tried.amin(0).sum()
    assert (end.abs() <= largest.abs()).all()


def test_four_bits_gain_much_from_mse():
    weight = conv_weight(16, 32, 3, 3)
    ends = (weight_range(weight, 0, method, -7, 7) for method in ("minmax", "mse"))
    wide, narrow = (weight_error(weight, end, -7, 7).sum() for end in ends)
    assert narrow < 0.8 * wide


@pytest.mark.parametrize(("method", "gain"), [("minmax", 0.85), ("mse", 0.92)])
def test_so_do_all_sixteen_levels(method, gain):
    weight = conv_weight(16, 32, 3, 3)
    even, all_of_them = (
        weight_error(weight, weight_range(weight, 0, method, *ends), *ends).sum() for ends in ((-7, 7), (-8, 7))
    )
    assert all_of_them < gain * even


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_the_channel_axis_is_where_it_was_said(method):
    weight = conv_weight(6, 5, 3, 3)
    along_first = weight_range(weight, 0, method)
    torch.testing.assert_close(weight_range(weight.transpose(0, 1), 1, method), along_first)
    torch.testing.assert_close(weight_range(weight.permute(1, 2, 3, 0), -1, method), along_first)
    assert weight_range(weight, 1, method).shape == (5,)
    whole = weight_range(weight, None, method)
    assert whole.shape == ()
    assert whole.abs() <= weight.abs().max()


def test_ties_go_to_minmax():
    weight = torch.tensor([[127.0, -3.0, 64.0], [0.0, 0.0, 0.0], [5.0, 5.0, -5.0], [1e-9, 3e-10, -5e-10]])
    torch.testing.assert_close(weight_range(weight, 0, "mse"), weight_range(weight, 0), rtol=0, atol=0)


def test_bad_weights_are_refused():
    with pytest.raises(QtoolError, match="layer 'fc': expected finite weights; got NaN or infinity in channel 1"):
        weight_range(torch.tensor([[1.0], [math.nan]]), 0, where="layer 'fc'")
    with pytest.raises(UsageError, match="did you mean 'mse'"):
        weight_range(torch.ones(1, 1), 0, "mes")
