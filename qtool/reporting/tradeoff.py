"""The picture of a trade: what each candidate loses against what it costs, and the limit that was promised.

A candidate that no other beats in both stands on the frontier, which is drawn as steps and named; the others are marks
with a title. Where more is better (agreement) up is still up, and the limit is a floor instead of a ceiling. What lies
so far from all these that they would be one line beside it is counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtool.reporting.axes import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale, fitting, frame, padded, svg
from qtool.reporting.front import steps, unbeaten
from qtool.reporting.markup import Markup, el
from qtool.reporting.numbers import significant
from qtool.units import many

REACH = 5.0
"""How far beyond the frontier and the limit a candidate is shown, in multiples of what these span."""
LETTER = 6.7
"""The width of a letter, of the chart's units."""
Span = tuple[float, float, float]
"""Where a text begins, ends and stands."""


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
    height, front = 260.0, frontier(candidates, more_is_better)
    near = [limit, *(v for c in front for v in (c.value, *(c.bounds or ())))]
    reach = REACH * (max(near) - min(near))
    shown = [c for c in candidates if min(near) - reach <= c.value <= max(near) + reach]
    x = Scale(*padded([c.cost for c in shown], 0.15), LEFT + 14, WIDTH - RIGHT)  # room for ticks like 0.0015
    y = Scale(*padded([*near, *(c.value for c in shown)], 0.1), height - BOTTOM, TOP)
    parts: list[object] = [*frame(x, y, cost, value), steps([(c.cost, c.value) for c in front], x, y)]
    parts.append(el("line", x1=x.start, x2=x.end, y1=y(limit), y2=y(limit), cls="limit"))
    on_top = sorted(shown, key=front.__contains__)
    parts += [_mark(candidate, x, y, "s-int8" if candidate in front else "s-fp32") for candidate in on_top]
    texts = [(f"limit {limit:g}", y(limit) - 5)]
    if beyond := len(candidates) - len(shown):
        texts.append((f"{many(beyond, 'candidate')} far beyond", y.start - 6 if more_is_better else y.end + 10))
    parts += [el("text", text, x=x.end - 4, y=at, text_anchor="end") for text, at in texts]
    parts += _names(front, x, y, [(x.end - 4 - LETTER * len(text), x.end, at) for text, at in texts])
    return svg(height, f"{value} against {cost}", *parts)


def _mark(candidate: Candidate, x: Scale, y: Scale, cls: str) -> Markup:
    place, whisker = x(candidate.cost), None
    if candidate.bounds:
        low, high = (y(min(max(bound, y.low), y.high)) for bound in candidate.bounds)
        whisker = el("line", x1=place, x2=place, y1=low, y2=high, cls=f"whisker {cls}")
    told = f"{candidate.name}: {significant(candidate.value)} at {significant(candidate.cost)}"
    dot = el("circle", cx=place, cy=y(candidate.value), r=4.5, cls=f"mark {cls}")
    return el("g", el("title", told), whisker, dot)


def _names(front: Sequence[Candidate], x: Scale, y: Scale, taken: list[Span]) -> list[Markup]:
    """The names of the frontier beside their marks, as much as there is room for, moved up where a text is already."""
    made: list[Markup] = []
    for candidate in front:
        right = x(candidate.cost) < WIDTH * 0.6
        place_x, place_y = x(candidate.cost) + (9 if right else -9), y(candidate.value) - 6
        name = fitting(candidate.name, WIDTH - place_x if right else place_x, LETTER)
        start = place_x if right else place_x - LETTER * len(name)
        end = start + LETTER * len(name)
        while any(start < b and a < end and abs(place_y - at) < 14 for a, b, at in taken):
            place_y -= 14
        taken.append((start, end, place_y))
        anchor = "start" if right else "end"
        made.append(el("text", name, x=place_x, y=place_y, text_anchor=anchor, cls="name"))
    return made
