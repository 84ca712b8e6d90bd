"""Intervals, against published formulas, numbers got by integration, and what 95 % promises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qtool.intervals import enough, paired_interval, student95, wilson_interval


def share_within(end: float, freedom: int) -> float:
    """How much of Student's t lies between −``end`` and ``end``: with t = √n tan φ its density goes with cosⁿ⁻¹ φ."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    return float(density[angles <= math.atan(end / math.sqrt(freedom))].sum() / density.sum())


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12, 40, 1000])
def test_student_leaves_5_percent_outside(freedom: int) -> None:
    end = student95(freedom)
    if freedom <= 2:
        assert share_within(end, freedom) == pytest.approx(0.95, abs=1e-5)
    assert share_within(0.99 * end, freedom) < 0.95 < share_within(1.01 * end, freedom)


def test_enough_is_the_least_within_half_a_percent() -> None:
    for wanted in (7, 100, 12_345, 10**9):
        found = enough(lambda size, wanted=wanted: size >= wanted, 5)  # type: ignore[misc]
        assert wanted <= found <= max(wanted, 1.005 * wanted)


def test_interval_is_the_published_formula() -> None:
    """Each end of Tango's interval, where the score (b − c − N d) / sqrt(N (2 q + d (1 − d))) is ± 1.96."""
    n, b, c = 1000, 30, 10
    for end, wanted in zip(paired_interval(b, c, n), (1.959964, -1.959964), strict=True):
        linear = (2 * n - b + c) * end - b - c
        q = np.roots([2 * n, linear, -c * end * (1 - end)]).max()
        assert (b - c - n * end) / math.sqrt(n * (2 * q + end * (1 - end))) == pytest.approx(wanted, rel=1e-5)


def test_interval_does_not_collapse_and_is_symmetric() -> None:
    low, high = paired_interval(0, 0, 1000)
    assert low == -high
    assert high == pytest.approx(wilson_interval(0, 1000)[1])
    assert paired_interval(10, 0, 1000) == pytest.approx(wilson_interval(10, 1000)), "without c it is Wilson's"
    low, high = paired_interval(3, 9, 100)
    assert paired_interval(9, 3, 100) == pytest.approx((-high, -low))
    assert paired_interval(5, 0, 5)[1] == 1.0


@pytest.mark.parametrize(("p12", "p21"), [(0.03, 0.01), (0.02, 0.02), (0.10, 0.05)])
def test_interval_covers_the_truth_19_times_in_20(p12: float, p21: float) -> None:
    draws = np.random.default_rng(0).multinomial(1000, [p12, p21, 1 - p12 - p21], size=4000)
    bounds = np.array([paired_interval(int(b), int(c), 1000) for b, c, _ in draws])
    covered = ((bounds[:, 0] <= p12 - p21) & (p12 - p21 <= bounds[:, 1])).mean()
    assert 0.94 < covered < 0.97


@pytest.mark.parametrize("lost", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("count", [200, 400, 540])
def test_interval_ends_below_the_true_drop_as_seldom_where_nothing_is_gained(count: int, lost: float) -> None:
    losses = np.random.default_rng(0).binomial(count, lost, size=20_000)
    passed = {int(b): paired_interval(int(b), 0, count)[1] < lost for b in set(losses)}
    assert np.mean([passed[int(b)] for b in losses]) <= 0.026
