from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.reporting.numbers import interval, percent, points, significant, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0000123, "0.0000123"), (0.5, "0.500"), (1.0, "1.00"), (12.345, "12.3"), (99.96, "100.0"), (123.4, "123"),
        (98765.4, "98,765"), (0, "0"), (-2.5, "-2.50"), (None, "–"), (math.inf, "∞"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_three_significant_digits(value, text):
    assert significant(value) == text


@given(st.floats(1e-9, 1e9))
def test_what_is_written_is_the_number(value):
    assert float(significant(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


def test_shares_ratios_and_intervals():
    assert percent(0.98765) == "98.8 %"
    assert times(2.456) == "2.46×"
    assert interval([-0.004, 0.01], 100) == "−0.40 to 1.00"
    assert interval(None) == interval([None, None]) == ""
    assert points(-0.0012) == "−0.12 points"
    assert points(-0.0) == "0.00 points"
    assert percent(None) == times(None) == points(None) == "–"
