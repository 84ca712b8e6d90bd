"""Scales, round ticks and the frame of a chart, in SVG.

A chart is 420 units wide and drawn at the width of its column, so that its 12-unit letters are legible on
a phone. Colours are CSS classes, which the page gives values for light, dark and paper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from qtool.reporting.markup import Markup, el

WIDTH = 420.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 42.0


def fitting(name: str, room: float, letter: float) -> str:
    """As much of a name as there is room for, in pixels, at ``letter`` pixels each."""
    most = int(room / letter)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def round_ticks(low: float, high: float) -> list[float]:
    """At most about five multiples of 1, 2 or 5 times a power of ten within low … high.

    >>> round_ticks(0.3, 9.7)
    [2.0, 4.0, 6.0, 8.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick's label with as many decimals as the distance between ticks needs."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=abs(value) or 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Scale:
    """Values low … high laid out on pixels start … end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The position of ``value``."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def padded(values: Sequence[float], share: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """The range of ``values`` with a margin, never narrower than ``least``."""
    low, high = min(values), max(values)
    margin = max((high - low) * share, (least - (high - low)) / 2, abs(high) * 1e-3, 1e-9)
    return low - margin, high + margin


def frame(x: Scale, y: Scale, x_label: str, y_label: str, *, as_percent: bool = False) -> list[Markup]:
    """Grid lines, ticks and axis titles for a plot between the two scales."""
    parts: list[Markup] = []
    ticks = round_ticks(x.low, x.high)
    for tick in ticks:
        parts.append(el("line", x1=x(tick), x2=x(tick), y1=y.start, y2=y.end, cls="grid"))
        parts.append(el("text", tick_text(tick, ticks), x=x(tick), y=y.start + 15, text_anchor="middle"))
    ticks = round_ticks(y.low, y.high)
    shown = [t * 100 for t in ticks] if as_percent else ticks
    for tick, value in zip(ticks, shown, strict=True):
        parts.append(el("line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick), cls="grid"))
        parts.append(el("text", tick_text(value, shown), x=x.start - 6, y=y(tick) + 4, text_anchor="end"))
    middle = (y.start + y.end) / 2
    parts.append(el("text", x_label, x=(x.start + x.end) / 2, y=y.start + 34, text_anchor="middle", cls="axis"))
    turned = f"rotate(-90 12 {middle:.1f})"
    parts.append(el("text", y_label, x=12.0, y=middle, text_anchor="middle", transform=turned, cls="axis"))
    return parts


def svg(height: float, title: str, *parts: object) -> Markup:
    """An SVG image of the standard width, with a title for those who do not see it."""
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return el("svg", el("title", title), *parts, viewBox=box, role="img", xmlns="http://www.w3.org/2000/svg")
