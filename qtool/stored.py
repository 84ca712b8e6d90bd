"""What a JSON file that qtool wrote has to hold before it is believed: it may have been edited, or cut short.

What is asked of a value is a function that says whether it will do, or is made of such functions: a list whose one
entry is asked of each of a list's, a dict whose values are asked of those under its keys, or under ``EACH`` of all.
What ends in a question mark may be missing or null.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

EACH = "*"
_MISSING = object()


def is_text(value: Any) -> bool:
    """Whether ``value`` is text."""
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Whether a comparison of ``value`` tells something: nothing is better or worse than NaN."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def is_decibels(value: Any) -> bool:
    """Whether ``value`` is a number, or infinite as of equal outputs."""
    return is_number(value) or value in (math.inf, -math.inf)


def or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What is asked of a value that has to be there, and may be null."""
    return lambda value: value is None or kind(value)


def fault_of(value: Any, asked: Any, at: str = "") -> str:
    """The first thing in ``value`` that is missing or not as it is ``asked`` for, in words; empty where all is."""
    right = isinstance(value, type(asked)) if isinstance(asked, dict | list) else asked(value)
    if not right:
        return f"with {str(value)[:20]!r} as {at or 'the whole'}"
    for place, item, kind in _parts(value, asked):
        where = place if place.startswith("[") or not at else f".{place}"
        if fault := f"without {at}{where}" if item is _MISSING else fault_of(item, kind, f"{at}{where}"):
            return fault
    return ""


def _parts(value: Any, asked: Any) -> Iterator[tuple[str, Any, Any]]:
    """What is inside a value: where, the thing itself and what is asked of it."""
    if isinstance(asked, list):
        yield from ((f"[{index}]", item, asked[0]) for index, item in enumerate(value))
    elif isinstance(asked, dict) and EACH in asked:
        yield from ((key, item, asked[EACH]) for key, item in value.items())
    elif isinstance(asked, dict):
        for key, kind in asked.items():
            name = key.removesuffix("?")
            if not (key.endswith("?") and value.get(name) is None):
                yield name, value.get(name, _MISSING), kind
