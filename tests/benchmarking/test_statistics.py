from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.benchmarking.statistics import (
    interval_rank,
    median_interval,
    percentiles_ms,
    quantile_sketch_ms,
    spread,
)


@pytest.mark.parametrize("n", [*range(1, 40), 100, 999])
def test_ranks_are_those_of_the_binomial_distribution(n):
    """Against the definition in exact integers: the greatest k with P(Bin(n, 1/2) < k) at most 2.5 %."""
    below = [0, *itertools.accumulate(math.comb(n, i) for i in range(n // 2))]
    expected = max(k for k in range(n // 2 + 1) if below[k] * 40 <= 2**n)
    assert (interval_rank(n) or 0) == expected


def test_the_interval_covers_the_median_as_often_as_it_says():
    generator = np.random.default_rng(0)
    draws = generator.exponential(size=(4000, 25))
    intervals = [median_interval(row) for row in draws]
    covered = np.mean([low <= math.log(2) <= high for low, high in intervals])
    assert 0.95 <= covered <= 0.98  # exactly 95.7 % for n = 25, rank 8


@given(st.lists(st.floats(1e-6, 1e3), min_size=6, max_size=60))
def test_the_interval_holds_the_sample_median(values):
    low, high = median_interval(values)
    assert low <= np.median(values) <= high


def test_five_values_give_no_interval():
    assert median_interval([1, 2, 3, 4, 5]) is None


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
