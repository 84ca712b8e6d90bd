from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.benchmarking.statistics import (
    percentiles_ms,
    quantile_sketch_ms,
    quiet_interval,
    quiet_ratio,
    spread,
)

ROUNDS = st.lists(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5), min_size=6, max_size=40)


def measured(generator, busy, rounds=300, runs=3):
    """Two files, one twice as fast, and a neighbour for 20 rounds at a time, who slows the fast one more."""
    there = np.repeat(generator.random(-(-rounds // 20)) < busy, 20)[:rounds, None]
    noise = generator.lognormal(0, 0.01, (2, rounds, runs))
    return (2 * noise[0] * (1 + 0.15 * there)).tolist(), (noise[1] * (1 + 0.3 * there)).tolist()


def test_a_neighbour_moves_the_ratio_of_medians_and_not_that_of_quiet_times():
    generator = np.random.default_rng(0)
    alone, beside = measured(generator, 0.0), measured(generator, 0.7)
    assert quiet_ratio(*alone) == pytest.approx(2.0, rel=0.005)
    assert quiet_ratio(*beside) == pytest.approx(2.0, rel=0.005)
    assert np.median(beside[0]) / np.median(beside[1]) < 1.85


def test_a_quiet_time_is_the_mean_of_the_fastest_twentieth():
    generator = np.random.default_rng(1)
    slow, fast = generator.exponential(2, (250, 2)), generator.exponential(1, (250, 4))
    expected = np.sort(slow.ravel())[:25].mean() / np.sort(fast.ravel())[:50].mean()
    assert quiet_ratio(slow.tolist(), fast.tolist()) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "taken"), [(6, 3), (30, 15), (100, 20), (1000, 50)])
def test_of_few_runs_twenty_count_but_never_more_than_half(count, taken):
    values = np.random.default_rng(2).exponential(1, count)
    assert quiet_ratio([[v] for v in values], [[1.0]] * count) == pytest.approx(np.sort(values)[:taken].mean())


def test_the_interval_covers_the_ratio_about_as_often_as_it_says_although_neighbours_stay():
    generator = np.random.default_rng(3)
    intervals = [quiet_interval(*measured(generator, 0.5)) for _ in range(150)]
    assert 0.85 <= np.mean([low <= 2.0 <= high for low, high in intervals]) <= 1.0
    assert np.median([high - low for low, high in intervals]) < 0.02


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("busy", [0.0, 0.4])
def test_the_interval_knows_that_processes_differ_and_neighbours_stay(count, busy):
    """Two files that are the same, in ``count`` sittings of ten rounds: the ratio is 1."""
    generator = np.random.default_rng(5)

    def timed():
        there = generator.random((1, count, 1, 1)) < busy
        slower = 1 + there * generator.uniform(0.05, 0.2, (1, count, 1, 1)) * np.array([1, 0.5])[:, None, None, None]
        processes = generator.lognormal(0, 0.005, (2, count, 1, 1))
        return (slower * processes * (1 + generator.exponential(0.01, (2, count, 10, 10)))).reshape(2, -1, 10)

    intervals = [quiet_interval(*timed(), range(0, 10 * count, 10)) for _ in range(80)]
    assert np.mean([low <= 1.0 <= high for low, high in intervals]) >= 0.82
    if not busy:
        assert np.median([high - low for low, high in intervals]) < 0.03


def test_where_no_quiet_moment_is_sure_the_interval_is_wide():
    slow, fast = measured(np.random.default_rng(4), 0.0, rounds=100)
    one_block = [[v * (1 if 40 <= i < 50 else 1.3) for v in burst] for i, burst in enumerate(fast)]
    low, high = quiet_interval(slow, one_block)
    assert high - low > 0.2


@given(ROUNDS)
def test_an_interval_holds_its_ratio_and_is_scaled_with_it(rounds):
    low, high = quiet_interval(rounds, [[1.0] * len(burst) for burst in rounds])
    twice = quiet_interval([[2 * v for v in burst] for burst in rounds], [[1.0] * len(burst) for burst in rounds])
    assert low <= high
    assert twice == pytest.approx((2 * low, 2 * high))


def test_five_rounds_give_no_interval():
    assert quiet_interval([[1.0]] * 5, [[1.0]] * 5) is None


def test_spread_is_the_relative_standard_deviation_of_normal_values_and_ignores_outliers():
    values = np.random.default_rng(1).normal(10, 0.5, 20_000)
    assert spread(values) == pytest.approx(0.05, rel=0.03)
    values[:500] *= 100
    assert spread(values) == pytest.approx(0.05, rel=0.06)
    assert spread([0.0, 0.0]) == 0.0


def test_percentiles_are_numpys_in_milliseconds():
    seconds = np.random.default_rng(2).exponential(0.002, 500)
    told = percentiles_ms(seconds)
    assert told["latency_p90_ms"] == pytest.approx(np.percentile(seconds, 90) * 1000)
    assert told["latency_mean_ms"] == pytest.approx(seconds.mean() * 1000)
    assert told["latency_p50_ms"] < told["latency_p90_ms"] < told["latency_p99_ms"]


def test_the_sketch_keeps_both_ends_and_the_order():
    sketch = quantile_sketch_ms([0.003, 0.001, 0.002])
    assert (sketch[0], sketch[50], sketch[-1], len(sketch)) == (1.0, 2.0, 3.0, 101)
    assert sketch == sorted(sketch)
