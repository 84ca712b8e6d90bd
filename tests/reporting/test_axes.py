from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.reporting.axes import Scale, fitting, frame, padded, round_ticks, tick_text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_within(low, width):
    high = low + width
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= t <= high + slack for t in ticks)
    steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
    if len(ticks) > 2 and width > 1e-3 * abs(low):
        step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
        leading = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(leading - m) for m in (1, 2, 5, 10)) < 1e-3
        assert max(steps) - min(steps) <= 1e-3 * step


def test_a_range_of_nothing_has_one_tick():
    assert round_ticks(3.0, 3.0) == [3.0]


def test_labels_tell_neighbours_apart():
    assert [tick_text(t, [0.0, 0.25, 0.5]) for t in (0.0, 0.25)] != ["0.2", "0.2"]
    assert [tick_text(t, [81.5, 82.0]) for t in (81.5, 82.0)] == ["81.5", "82.0"]
    assert tick_text(1000, [0, 1000, 2000]) == "1,000"


def test_a_scale_is_linear_and_runs_either_way():
    down = Scale(0, 10, 200, 100)
    assert [down(v) for v in (0, 5, 10)] == [200, 150, 100]
    assert Scale(1, 1, 0, 10)(1) == 5


@pytest.mark.parametrize("values", [[1.0], [0.0], [0.8, 0.9], [-5.0, 5.0]])
def test_padding_leaves_room_on_both_sides(values):
    low, high = padded(values, least=0.01)
    assert low < min(values)
    assert high > max(values)
    assert high - low >= 0.01 * 0.999


def test_a_frame_names_both_axes():
    text = "".join(frame(Scale(0, 1, 50, 400), Scale(0.8, 0.9, 200, 10), "time", "top-1, %", as_percent=True))
    assert "time" in text
    assert ">82<" in text
    assert text.count("<line") == text.count("<text") - 2


@given(st.text("abc", max_size=30), st.integers(1, 40))
def test_a_name_takes_no_more_room_than_there_is(name, most):
    found = fitting(name, most * 6.5, 6.5)
    assert len(found) <= most
    assert found == name if len(name) <= most else found == name[: most - 1] + "…"
