"""The histogram against exact arithmetic, and its independence of order, batches and memory layout."""

from __future__ import annotations

import copy
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import QtoolError
from qtool.quantization.ranges import estimate
from qtool.quantization.ranges import histogram as module
from qtool.quantization.ranges.histogram import HALF_BINS, Histogram, count_numpy, count_torch, sample_stride

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
STREAMS = st.lists(st.lists(FLOATS, min_size=1, max_size=6), min_size=1, max_size=8)


def observed(batches, **options) -> Histogram:
    histogram = Histogram("features.3", **options)
    for batch in batches:
        histogram.update(batch if isinstance(batch, torch.Tensor) else torch.tensor(batch, dtype=torch.float32))
    return histogram


def assert_same(one: Histogram, other: Histogram) -> None:
    states = [histogram.state_dict() for histogram in (one, other)]
    averages = [state.pop("average") for state in states]
    assert states[0] == states[1]
    assert averages[0] is None or averages[0] == pytest.approx(averages[1], rel=1e-6, abs=1e-30)


def exact_counts(values: list[float], exponent: int) -> np.ndarray:
    counts = np.zeros(2 * HALF_BINS, dtype=np.int64)
    for value in values:
        counts[math.floor(Fraction(value) / Fraction(2) ** exponent) + HALF_BINS] += 1
    return counts


@given(STREAMS)
def test_counts_are_exact_whatever_came_before(batches):
    values = [value for batch in batches for value in batch]
    histogram = observed(batches)
    np.testing.assert_array_equal(histogram.counts, exact_counts(values, histogram.exponent))
    assert (histogram.minimum, histogram.maximum) == (min(values), max(values))
    assert histogram.num_zeros == values.count(0.0)
    assert histogram.total == histogram.num_samples == len(values)


@given(STREAMS, st.randoms(use_true_random=False))
def test_order_and_batches_do_not_matter(batches, random):
    values = [value for batch in batches for value in batch]
    whole = observed([values])
    assert_same(observed(batches), whole)
    random.shuffle(values)
    assert_same(observed([values[0::3], values[1::3], values[2::3]]), whole)


@given(STREAMS, STREAMS)
def test_merging_equals_seeing_both(first, second):
    merged = observed(first)
    part = observed(second)
    before = part.state_dict()
    merged.merge(part)
    assert_same(merged, observed(first + second))
    assert part.state_dict() == before


@given(STREAMS)
def test_the_grid_is_as_fine_as_the_bins_allow(batches):
    histogram = observed(batches)
    magnitude = max(-histogram.minimum, histogram.maximum)
    if magnitude >= 2.0**-113:  # below, the width is at its least
        assert HALF_BINS / 2 <= magnitude / histogram.bin_width < HALF_BINS


@given(STREAMS)
def test_state_survives_json(batches):
    for bins in (True, False):
        histogram = observed(batches, bins=bins)
        assert_same(Histogram.from_state(json.loads(json.dumps(histogram.state_dict()))), histogram)


def test_an_empty_state_survives_json():
    assert_same(Histogram.from_state(json.loads(json.dumps(Histogram("a").state_dict()))), Histogram("a"))


@pytest.mark.parametrize("change", [{"counts": "AAAA"}, {"exponent": None}, {"minimum": "x"}, {"counts": 3}])
def test_a_broken_state_is_refused(change):
    state = observed([[1.0, 2.0]]).state_dict() | change
    with pytest.raises(QtoolError, match=r"saved histogram of layer 'features\.3'"):
        Histogram.from_state(state)
    with pytest.raises(QtoolError, match="calibrate again"):
        Histogram.from_state({})


def test_a_growing_range_costs_no_memory_and_no_count():
    torch.manual_seed(0)
    histogram = Histogram("a")
    for power in range(-100, 100, 5):
        histogram.update(torch.randn(16, 32) * 2.0**power)
    assert histogram.counts.nbytes == 64 * 1024
    assert histogram.total == 40 * 16 * 32


def test_large_samples_are_read_with_a_stride_and_extremes_in_full():
    torch.manual_seed(0)
    x = torch.randn(3, 24, 40, 30)
    x[1, 7, 13, 11], x[2, 23, 39, 29] = -50.0, 70.0
    histogram = observed([x])
    stride = sample_stride((24, 40, 30))
    assert stride > 1
    assert (histogram.minimum, histogram.maximum) == (-50.0, 70.0)
    assert histogram.total == pytest.approx(x.numel(), rel=0.01)
    expected = exact_counts(x.flatten(1)[:, ::stride].flatten().tolist(), histogram.exponent) * stride
    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.num_zeros == 0
    assert observed([torch.relu(x)]).num_zeros == pytest.approx(x.numel() / 2, rel=0.1)


@pytest.mark.parametrize(
    "shape", [(96, 112, 112), (64, 56, 56), (2048, 7, 7), (197, 768), (3, 224, 224), (100_000,), (12, 197, 197)]
)
def test_the_stride_visits_every_index_of_every_dimension(shape):
    stride = sample_stride(shape)
    taken = np.unravel_index(np.arange(0, math.prod(shape), stride), shape)
    assert 1000 <= taken[0].size <= module.VALUES_PER_SAMPLE
    for coordinates, size in zip(taken, shape, strict=True):
        share = np.bincount(coordinates, minlength=size)
        assert share.max() - share.min() <= max(3, 0.1 * share.mean()) or size > module.VALUES_PER_SAMPLE


def test_batch_size_and_memory_format_do_not_change_what_is_counted():
    torch.manual_seed(0)
    x = torch.randn(6, 32, 20, 20)
    reference = observed([x])
    assert_same(observed(x.split([1, 3, 2])), reference)
    assert_same(observed([x.to(memory_format=torch.channels_last)]), reference)
    assert_same(observed([x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)]), reference)
    assert_same(observed([torch.stack((x, x), dim=-1)[..., 0]]), reference)


def test_a_dense_tensor_is_swept_in_the_order_of_memory():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert module._in_memory_order(x).is_contiguous()
    assert module._in_memory_order(x.transpose(1, 3)).is_contiguous()


def test_extremes_are_exact_for_small_and_large_samples_in_any_layout():
    for shape in ((5, 7), (4, 16, 24, 24)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for value in (x, x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.T.contiguous().T):
            histogram = observed([value])
            assert (histogram.minimum, histogram.maximum) == (float(x.min()), float(x.max()))
            averages = x.flatten(1).amin(1).double().mean(), x.flatten(1).amax(1).double().mean()
            assert histogram.average == pytest.approx([float(a) for a in averages])


def test_one_dimension_and_none():
    strided = torch.arange(10.0)[::2]
    assert_same(observed([strided]), observed([strided.contiguous()]))
    assert observed([torch.tensor(3.0), torch.tensor([1.0])]).num_samples == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int32])
def test_other_dtypes_are_read_as_float32(dtype):
    x = torch.tensor([[0, 1, 2], [3, 4, 100]], dtype=dtype)
    assert_same(observed([x]), observed([x.float()]))


def test_gradients_and_the_input_are_left_alone():
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)
    assert observed([x]).minimum == -2.0
    torch.testing.assert_close(x.detach(), torch.tensor([[1.0, -2.0]]), rtol=0, atol=0)


@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_both_ways_of_counting_agree(values):
    x = torch.tensor(values)
    per_bin = 2.0 ** -observed([x], bins=True).exponent
    one, other = count_numpy(x, per_bin), count_torch(x, per_bin)
    np.testing.assert_array_equal(one[0], other[0])
    assert one[1] == other[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_counts_the_same():
    x = torch.randn(8, 64, 28, 28, generator=torch.Generator().manual_seed(0))
    assert_same(observed([x.cuda()]), observed([x]))
    assert_same(observed([x.cuda().to(memory_format=torch.channels_last)]), observed([x]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bins", [True, False])
def test_a_value_that_is_not_finite_is_refused_and_changes_nothing(bad, bins):
    histogram = observed([[1.0, 2.0]], bins=bins)
    before = histogram.state_dict()
    got = "NaN;" if math.isnan(bad) else rf"infinity \({'-inf to 9' if bad < 0 else '0.5 to inf'}\)"
    with pytest.raises(QtoolError, match=rf"layer 'features\.3': expected finite values; got {got}"):
        histogram.update(torch.tensor([[0.5, bad, 9.0]]))
    assert histogram.state_dict() == before


def test_a_histogram_that_saw_nothing_has_no_range():
    for histogram in (Histogram("features.3"), observed([torch.empty(0, 5)])):
        for method in ("minmax", "percentile", "mse", "entropy"):
            with pytest.raises(QtoolError) as raised:
                estimate(histogram, method)
            assert str(raised.value) == (
                "layer 'features.3': expected finite min <= max; got inf, -inf; pass at least one calibration batch"
            )


def test_extremes_alone_serve_minmax_and_nothing_else():
    histogram = observed([[-1.0, 3.0]], bins=False)
    assert estimate(histogram) == (-1.0, 3.0)
    with pytest.raises(QtoolError, match="'mse' ranges are read from"):
        estimate(histogram, "mse")
    with pytest.raises(QtoolError, match="one of each"):
        histogram.merge(Histogram("b"))


def test_a_copy_is_independent():
    histogram = observed([[1.0]])
    other = copy.deepcopy(histogram)
    other.update(torch.tensor([5.0]))
    assert (histogram.maximum, histogram.total) == (1.0, 1)


@settings(max_examples=20)
@given(st.integers(-126, 110))
def test_a_unit_change_by_a_power_of_two_moves_the_grid_with_it(power):
    x = torch.linspace(1.0, 4000.0, 100)
    one, other = observed([x]), observed([x * 2.0**power])
    if other.exponent > -126:
        assert other.exponent == one.exponent + power
        np.testing.assert_array_equal(one.counts, other.counts)


@pytest.mark.parametrize("count", [5, 3000])
def test_rows_of_tokens_are_seen_as_their_samples(count: int) -> None:
    x = torch.randn(4, count, 6, generator=torch.Generator().manual_seed(0))
    whole, rows, others = Histogram("x"), Histogram("x"), Histogram("x")
    whole.weigh(1, weights := torch.arange(1.0, 7.0) / 3.5)
    rows.weigh(0, weights)
    whole.update(x, 4)
    rows.update(x.flatten(0, 1), 4)
    assert rows.state_dict() == whole.state_dict()
    others.update(x.flatten(0, 1)[:-1], 4)  # not as many for each
    assert others.num_samples == 4 * count - 1
