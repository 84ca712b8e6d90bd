"""The picture of a trade: what each candidate loses against what it costs, and the limit that was promised.

A candidate that no other beats in both stands on the frontier, which is drawn as steps and named; the others are marks
with a title. Where more is better (agreement) up is still up, and the limit is a floor instead of a ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtool.reporting.axes import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale, frame, padded, svg
from qtool.reporting.front import steps, unbeaten
from qtool.reporting.markup import Markup, el
from qtool.reporting.numbers import significant


@dataclass(frozen=True)
class Candidate:
    """What a candidate costs and what was measured of it, with its 95 % interval where that is finite."""

    name: str
    cost: float
    value: float
    bounds: tuple[float, float] | None = None


def frontier(candidates: Sequence[Candidate], more_is_better: bool = False) -> list[Candidate]:
    """Those than which none is both cheaper and closer, the cheapest first."""
    sign = -1 if more_is_better else 1
    return unbeaten(candidates, lambda candidate: (candidate.cost, sign * candidate.value))


def tradeoff(
    candidates: Sequence[Candidate], limit: float, cost: str, value: str, *, more_is_better: bool = False
) -> Markup:
    """Marks of all candidates over their cost, the frontier through the best, and a line at the limit."""
    height = 260.0
    values = [v for c in candidates for v in (c.value, *(c.bounds or ()))]
    x = Scale(*padded([c.cost for c in candidates], 0.15), LEFT + 14, WIDTH - RIGHT)  # room for ticks like 0.0015
    y = Scale(*padded([*values, limit], 0.1), height - BOTTOM, TOP)
    front = frontier(candidates, more_is_better)
    parts: list[object] = [*frame(x, y, cost, value), steps([(c.cost, c.value) for c in front], x, y)]
    parts.append(el("line", x1=x.start, x2=x.end, y1=y(limit), y2=y(limit), cls="limit"))
    parts.append(el("text", f"limit {limit:g}", x=x.end - 4, y=y(limit) - 5, text_anchor="end"))
    parts += [_mark(candidate, x, y, "s-int8" if candidate in front else "s-fp32") for candidate in candidates]
    parts += _names(front, x, y, taken=[(x.end - 4, y(limit) - 5)])
    return svg(height, f"{value} against {cost}", *parts)


def _mark(candidate: Candidate, x: Scale, y: Scale, cls: str) -> Markup:
    place, whisker = x(candidate.cost), None
    if candidate.bounds:
        low, high = map(y, candidate.bounds)
        whisker = el("line", x1=place, x2=place, y1=low, y2=high, cls=f"whisker {cls}")
    told = f"{candidate.name}: {significant(candidate.value)} at {significant(candidate.cost)}"
    dot = el("circle", cx=place, cy=y(candidate.value), r=4.5, cls=f"mark {cls}")
    return el("g", el("title", told), whisker, dot)


def _names(front: Sequence[Candidate], x: Scale, y: Scale, taken: list[tuple[float, float]]) -> list[Markup]:
    """The names of the frontier beside their marks, moved up where a text is there already."""
    made: list[Markup] = []
    for candidate in front:
        right = x(candidate.cost) < WIDTH * 0.6
        place_x, place_y = x(candidate.cost) + (9 if right else -9), y(candidate.value) - 6
        while any(abs(place_x - a) < 120 and abs(place_y - b) < 14 for a, b in taken):
            place_y -= 14
        taken.append((place_x, place_y))
        anchor = "start" if right else "end"
        made.append(el("text", candidate.name, x=place_x, y=place_y, text_anchor=anchor, cls="name"))
    return made
