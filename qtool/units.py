"""Units that figures are told in, to how many digits, and how many there are of a thing."""

import math
from collections.abc import Sequence

MIB = 2**20
"""Bytes of a mebibyte."""


def many(count: int, noun: str) -> str:
    """So many of what ``noun`` names, whose plural ends in s.

    >>> many(1, "step"), many(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def few(names: Sequence[str]) -> str:
    """The first three of names, and how many more there are.

    >>> few(["a", "b"]), few(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def figure(value: float, most: float = math.inf) -> str:
    """A number to three digits, and near the ``most`` that it can be to two digits of what is missing.

    >>> figure(-0.33333), figure(97.3456, 100), figure(99.9634, 100), figure(100, 100)
    ('-0.333', '97.3', '99.963', '100')
    """
    missing = most - value
    more = max(0, -math.floor(math.log10(missing))) if 0 < missing < math.inf else 0
    return f"{value:z.{3 + more}g}"


def bytes_told(size: float) -> str:
    """A number of bytes to three digits, in the unit that leaves some before the point.

    >>> [bytes_told(size) for size in (0, 430, 16_000, 5_330_004, 3 * 2**30)]
    ['0 bytes', '430 bytes', '15.6 KiB', '5.08 MiB', '3,072 MiB']
    """
    scale, unit = next(((s, u) for s, u in ((MIB, "MiB"), (1024, "KiB")) if size >= s), (1, "bytes"))
    value = size / scale
    digits = 0 if scale == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
