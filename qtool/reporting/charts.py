"""The report's pictures: the frontier, latency distributions, error by layer, and the training curve.

Each takes plain numbers and gives one SVG. A series keeps its colour and its mark through all of them,
and the marks differ in form too, for those who print or do not see the colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qtool.reporting.axes import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale, frame, padded, round_ticks, svg, tick_text
from qtool.reporting.front import steps, unbeaten
from qtool.reporting.markup import Markup, el
from qtool.reporting.numbers import percent, score, significant

_MOST_BARS = 30
_MOST_POINTS = 240


def series_class(name: str) -> str:
    """The CSS class that gives a variant its colour: by its number format, whatever stands after it."""
    known = ("fp32", "fp16", "bf16", "int8")
    return next((f"s-{k}" for k in known if name.startswith(k)), "s-other")


@dataclass(frozen=True)
class Point:
    """A variant on the frontier: time relative to the reference, a score, and its size.

    The bounds are 95 % intervals, or None.
    """

    name: str
    time: float
    score: float
    size_mib: float
    time_bounds: tuple[float, float] | None = None
    score_bounds: tuple[float, float] | None = None


def frontier(
    points: Sequence[Point], score_label: str, *, as_percent: bool = True, more_is_better: bool = True
) -> Markup:
    """Score against relative time; a mark's area is the file's size, its whiskers are 95 % intervals.

    Scores are shares where they are shown ``as_percent``.
    """
    height = 280.0
    times = [v for p in points for v in (p.time, *(p.time_bounds or ()))]
    scores = [v for p in points for v in (p.score, *(p.score_bounds or ()))]
    left = LEFT if as_percent else LEFT + 22  # room for ticks like 0.1735
    x = Scale(0.0, padded([*times, 0.0], 0.06)[1], left, WIDTH - RIGHT)
    least = 0.01 if as_percent else 0.01 * max(map(abs, scores))
    y = Scale(*padded(scores, 0.12, least=least), height - BOTTOM, TOP)
    largest = max(p.size_mib for p in points)
    parts: list[object] = [*frame(x, y, "time, reference = 1 (less is better)", score_label, as_percent=as_percent)]
    parts.append(_front_line(points, x, y, more_is_better))
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: -p.size_mib):
        radius = 5 + 9 * math.sqrt(point.size_mib / largest)
        parts.append(_whiskers(point, x, y))
        parts.append(_mark(point, x, y, radius, percent if as_percent else significant))
        parts.append(_label(point, x, y, radius, taken))
    return svg(height, "Accuracy against time and size", *parts)


def _front_line(points: Sequence[Point], x: Scale, y: Scale, more_is_better: bool) -> Markup | None:
    """The steps through those points that no other beats in both time and score."""
    sign = -1 if more_is_better else 1
    best = unbeaten(points, lambda point: (point.time, sign * point.score))
    return steps([(point.time, point.score) for point in best], x, y)


def _whiskers(point: Point, x: Scale, y: Scale) -> list[Markup]:
    cls, lines = f"whisker {series_class(point.name)}", []
    if point.time_bounds:
        low, high = map(x, point.time_bounds)
        lines.append(el("line", x1=low, x2=high, y1=y(point.score), y2=y(point.score), cls=cls))
    if point.score_bounds:
        low, high = map(y, point.score_bounds)
        lines.append(el("line", x1=x(point.time), x2=x(point.time), y1=low, y2=high, cls=cls))
    return lines


def _mark(point: Point, x: Scale, y: Scale, radius: float, told_as: Callable[[float], str]) -> Markup:
    figures = f"{significant(point.time)} of the time, {told_as(point.score)}, {significant(point.size_mib)} MiB"
    told = f"{point.name}: {figures}"
    return el("g", el("title", told), shape(point.name, x(point.time), y(point.score), radius))


def shape(name: str, cx: float, cy: float, radius: float) -> Markup:
    """A variant's mark: circle for FP32, square for a half precision, diamond for INT8, triangle for the rest."""
    cls = f"mark {series_class(name)}"
    if name.startswith("fp32"):
        return el("circle", cx=cx, cy=cy, r=radius, cls=cls)
    if name.startswith(("fp16", "bf16")):
        side = radius * 1.77
        return el("rect", x=cx - side / 2, y=cy - side / 2, width=side, height=side, cls=cls)
    r = radius * 1.25
    corners = [(0, -r), (r, 0), (0, r), (-r, 0)] if name.startswith("int8") else [(0, -r), (r, r * 0.8), (-r, r * 0.8)]
    return el("polygon", points=" ".join(f"{cx + a:.1f},{cy + b:.1f}" for a, b in corners), cls=cls)


def _label(point: Point, x: Scale, y: Scale, radius: float, taken: list[tuple[float, float]]) -> Markup:
    """The name beside its mark, on the side that has room, moved up past labels that are there already."""
    right = x(point.time) < WIDTH * 0.68
    aside = radius + 7
    place_x, place_y = x(point.time) + (aside if right else -aside), y(point.score) - 6
    while any(abs(place_x - a) < 80 and abs(place_y - b) < 15 for a, b in taken):
        place_y -= 15
    taken.append((place_x, place_y))
    return el("text", point.name, x=place_x, y=place_y, text_anchor="start" if right else "end", cls="name")


def distributions(quantiles: Mapping[str, Sequence[float]]) -> Markup:
    """One row per variant: a line over the middle 98 %, a box over the middle half, a tick at the median.

    Each sequence holds evenly spaced quantiles, the least value first.
    """
    row, names = 34.0, list(quantiles)
    height = TOP + row * len(names) + BOTTOM
    left = 92.0
    high = max(_at(q, 0.99) for q in quantiles.values())
    x = Scale(0.0, high * 1.04, left, WIDTH - RIGHT)
    parts: list[object] = []
    ticks = round_ticks(0.0, x.high)
    for tick in ticks:
        parts.append(el("line", x1=x(tick), x2=x(tick), y1=TOP, y2=height - BOTTOM, cls="grid"))
        parts.append(el("text", tick_text(tick, ticks), x=x(tick), y=height - BOTTOM + 15, text_anchor="middle"))
    for index, name in enumerate(names):
        parts += _strip(name, quantiles[name], x, TOP + row * (index + 0.5))
    parts.append(el("text", "latency, ms", x=(x.start + x.end) / 2, y=height - 8, text_anchor="middle", cls="axis"))
    return svg(height, "Distribution of latency", *parts)


def _at(quantiles: Sequence[float], share: float) -> float:
    return quantiles[round(share * (len(quantiles) - 1))]


def _strip(name: str, quantiles: Sequence[float], x: Scale, middle: float) -> list[Markup]:
    p1, p25, p50, p75, p99 = (_at(quantiles, s) for s in (0.01, 0.25, 0.5, 0.75, 0.99))
    cls = series_class(name)
    told = f"{name}: median {significant(p50)} ms, middle half {significant(p25)} to {significant(p75)}"
    box = el("rect", x=x(p25), y=middle - 8, width=max(1.5, x(p75) - x(p25)), height=16.0, cls=f"mark {cls}")
    return [
        el("text", name, x=8.0, y=middle + 4, cls="name"),
        el("line", x1=x(p1), x2=x(p99), y1=middle, y2=middle, cls=f"whisker {cls}"),
        el("g", el("title", f"{told}, 99 % below {significant(p99)}"), box),
        el("line", x1=x(p50), x2=x(p50), y1=middle - 11, y2=middle + 11, cls="median"),
    ]


def bars(values: Sequence[tuple[str, float]], label: str) -> Markup:
    """Named values as horizontal bars in the order given, at most thirty of them."""
    shown, row = list(values)[:_MOST_BARS], 18.0
    height, left = TOP + row * len(shown) + BOTTOM, 168.0
    low, high = min(0.0, *(v for _, v in shown)), max(0.0, *(v for _, v in shown))
    x = Scale(low, high * 1.05 or 1.0, left, WIDTH - RIGHT)
    parts: list[object] = []
    ticks = round_ticks(x.low, x.high)
    for tick in ticks:
        parts.append(el("line", x1=x(tick), x2=x(tick), y1=TOP, y2=height - BOTTOM, cls="grid"))
        parts.append(el("text", tick_text(tick, ticks), x=x(tick), y=height - BOTTOM + 15, text_anchor="middle"))
    for index, (name, value) in enumerate(shown):
        top = TOP + row * index
        start, end = sorted((x(0.0), x(value)))
        parts.append(el("text", _tail(name), x=left - 6, y=top + 13, text_anchor="end", cls="layer"))
        bar = el("rect", x=start, y=top + 3, width=max(1.0, end - start), height=row - 6, cls="mark s-int8")
        parts.append(el("g", el("title", f"{name}: {significant(value)}"), bar))
    parts.append(el("text", label, x=(x.start + x.end) / 2, y=height - 8, text_anchor="middle", cls="axis"))
    return svg(height, label, *parts)


def _tail(name: str, most: int = 24) -> str:
    return name if len(name) <= most else "…" + name[-(most - 1) :]


def curve(losses: Sequence[float], epochs: Mapping[int, float], metric: str) -> Markup:
    """Training loss by step, averaged where there are many, and below it the validation metric by its step."""
    height, finite = 250.0, [v for v in losses if v is not None and math.isfinite(v)]
    x = Scale(0.0, float(max(len(losses), *epochs, 1)), LEFT, WIDTH - RIGHT)
    y = Scale(min(0.0, min(finite)), max(finite) * 1.03, height - BOTTOM, TOP)
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(losses))
    parts: list[object] = [
        *frame(x, y, "optimizer step", "training loss"),
        el("polyline", points=path, cls="line s-fp32"),
    ]
    if epochs:
        low, high = padded(list(epochs.values()), 0.3, least=0.02)
        scores = Scale(low, high, height - BOTTOM, TOP)
        marks = [(x(step), scores(value), value) for step, value in epochs.items()]
        parts.append(el("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b, _ in marks), cls="line s-int8"))
        parts += [el("g", el("title", f"{metric} {score(metric, v)}"), shape("int8", a, b, 4.0)) for a, b, v in marks]
        a, b, value = marks[-1]
        parts.append(el("text", f"{metric} {score(metric, value)}", x=a - 8, y=b - 9, text_anchor="end", cls="name"))
    return svg(height, "Training", *parts)


def thinned(values: Sequence[float], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """(position, value) pairs, neighbours averaged until there are at most ``most``; what is not finite is left out."""
    width = max(1, math.ceil(len(values) / most))
    made = []
    for start in range(0, len(values), width):
        part = [v for v in values[start : start + width] if v is not None and math.isfinite(v)]
        if part:
            made.append((start + (len(values[start : start + width]) + 1) / 2, sum(part) / len(part)))
    return made
