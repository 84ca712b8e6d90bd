"""What is asked of stored JSON, and how the first fault is told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qtool.stored import EACH, fault_of, is_decibels, is_number, is_text

ASKED = {"name": is_text, "rows": [{"size": is_number, "note?": is_text}], "by_name": {EACH: is_decibels}}
WHOLE: dict[str, Any] = {"name": "a", "rows": [{"size": 1}, {"size": 2.5, "note": None}], "by_name": {"x": math.inf}}


def test_what_is_whole_has_no_fault_and_may_hold_more() -> None:
    assert fault_of(WHOLE | {"more": 1}, ASKED) == ""
    assert fault_of({}, {}) == fault_of([], [is_text]) == ""


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], "with '[]' as the whole"),
        ({"name": "a"}, "without rows"),
        (WHOLE | {"name": 3}, "with '3' as name"),
        (WHOLE | {"rows": [{"size": 1}, {}]}, "without rows[1].size"),
        (WHOLE | {"rows": [{"size": 1, "note": 2}]}, "with '2' as rows[0].note"),
        (WHOLE | {"rows": [{"size": math.nan}]}, "with 'nan' as rows[0].size"),
        (WHOLE | {"by_name": {"x": "far"}}, "with 'far' as by_name.x"),
    ],
)
def test_the_first_fault_is_told_with_its_place(value: Any, fault: str) -> None:
    assert fault_of(value, ASKED) == fault
