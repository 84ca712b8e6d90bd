"""How numbers are written: enough digits to tell two apart, no more, and a dash for what was not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qtool.units import figure

SHARES = ("top1", "top5", "accuracy")
"""Metrics that are shares of samples."""
UNKNOWN = "–"


def significant(value: float | None, digits: int = 3) -> str:
    """``value`` with that many significant digits, and never in powers of ten.

    >>> [significant(v) for v in (0.012345, 3.14159, 1234.5, None)]
    ['0.0123', '3.14', '1,234', '–']
    """
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "∞" if value > 0 else UNKNOWN
    if value == 0:
        return "0"
    above = math.floor(math.log10(abs(value))) + 1  # digits before the point, negative below 0.1
    return f"{value:,.{max(0, digits - above)}f}"


def decibels(value: float | None) -> str:
    """A ratio with one digit behind the point.

    >>> decibels(31.04), decibels(math.inf), decibels(None)
    ('31.0', '∞', '–')
    """
    return significant(value) if value is None or not math.isfinite(value) else f"{value:.1f}"


def percent(share: float | None) -> str:
    """A share as a percentage, 100.0 % where it is all.

    >>> percent(0.98765), percent(0.9998), percent(1.0), percent(None)
    ('98.8 %', '99.98 %', '100.0 %', '–')
    """
    if share is None:
        return UNKNOWN
    told = f"{share * 100:.1f}"
    return f"{figure(share * 100, 100) if share < 1 and told == '100.0' else told} %"


def score(name: str, value: float | None) -> str:
    """A metric: shares of samples as percentages, the rest as numbers.

    >>> score("top1", 0.9), score("mse", 3.2)
    ('90.0 %', '3.20')
    """
    return percent(value) if name in SHARES else significant(value)


def changes(name: str, bounds: Sequence[float] | None) -> str:
    """The 95 % interval of a metric's change, signed, or nothing where there is none; of shares in points.

    >>> changes("mse", (-0.00123, 0.2)), changes("top5", (-0.012, 0.0))
    ('−0.00123 to +0.200', '−1.20 to +0 points')
    """
    if not bounds:
        return ""
    scale, unit = (100, " points") if name in SHARES else (1, "")
    low, high = (f"{'−' if bound < 0 else '+'}{significant(abs(bound * scale))}" for bound in bounds)
    return f"{low} to {high}{unit}"


def times(ratio: float | None) -> str:
    """A ratio, as ``3.2×``."""
    return UNKNOWN if ratio is None else f"{ratio:.2f}×"


def interval(bounds: Sequence[float] | None, scale: float = 1.0) -> str:
    """A 95 % interval as ``low to high``, or nothing where there is none."""
    if not bounds or any(b is None for b in bounds):
        return ""
    low, high = (f"{b * scale:.2f}" for b in bounds)
    return f"{low} to {high}".replace("-", "−")


def points(share: float | None) -> str:
    """A difference of shares in percentage points, as ``0.30 points``."""
    if share is None:
        return UNKNOWN
    return f"{share * 100 + 0.0:.2f} points".replace("-", "−")
