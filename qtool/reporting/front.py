"""The frontier of a chart: what nothing else beats in both directions, and the steps through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from qtool.reporting.axes import Scale
from qtool.reporting.markup import Markup, el

T = TypeVar("T")


def unbeaten(items: Sequence[T], key: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those than which none is as small in both numbers of ``key`` and smaller in one, by the first number."""
    found: list[T] = []
    for item in sorted(items, key=key):
        if not found or key(item)[1] < key(found[-1])[1]:
            found.append(item)
    return found


def steps(front: Sequence[tuple[float, float]], x: Scale, y: Scale) -> Markup | None:
    """A line through the points of a frontier, which keeps each one's value up to the next."""
    if len(front) < 2:
        return None
    corners = [(x(front[0][0]), y(front[0][1]))]
    for along, value in front[1:]:
        corners += [(x(along), corners[-1][1]), (x(along), y(value))]
    return el("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners), cls="front")
