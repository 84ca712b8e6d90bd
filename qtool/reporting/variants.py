"""Where each variant stands: accuracy, or a task's own metric, against time and size, within 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.reporting import charts
from qtool.reporting.gather import Run
from qtool.reporting.markup import Markup, figure
from qtool.reporting.numbers import SHARES


def frontier(run: Run) -> Markup | None:
    """Accuracy against time and size, the reference and everything compared with it."""
    own = own_metric(run)
    shown = list(points(run, own))
    if len(shown) < 2 or any(math.isnan(point.score) for point in shown):
        return None
    measured = own or ("top-1" if any(p.score_bounds for p in shown) else "agreement")
    share = own is None or own in SHARES
    more = own is None or all(entry["accuracy"].get("higher_is_better", True) for entry in _variants(run))
    caption = (
        f"{'Higher' if more else 'Lower'} and further left is better. A mark's area is the file's size; its whiskers "
        "are 95 % intervals. Time is relative to the reference measured in the same rounds."
    )
    label = f"{measured}, %" if share else measured
    return figure(charts.frontier(shown, label, as_percent=share, more_is_better=more), caption)


def _variants(run: Run) -> Iterator[Mapping[str, Any]]:
    for place in run.measured:
        assert place.benchmark is not None
        yield from place.benchmark["variants"].values()


def own_metric(run: Run) -> str | None:
    """The metric that decides of a task of its own, where every variant was judged by it."""
    found = [entry.get("accuracy") or {} for entry in _variants(run)]
    names = {each.get("metric") if each.get("metric") in each.get("metrics", ()) else None for each in found}
    return names.pop() if len(names) == 1 else None


def points(run: Run, own: str | None) -> Iterator[charts.Point]:
    """Every variant as a point; of several folders the float variants are taken from the first."""
    seen: set[str] = set()
    for place in run.measured:
        result = place.benchmark
        assert result is not None
        for name, entry in result["variants"].items():
            label = f"{name} {place.name}" if place is not run and name.startswith("int8") else name
            if label not in seen:
                seen.add(label)
                yield _point(label, entry, result["reference"] == name, own)


def _point(label: str, entry: Mapping[str, Any], is_reference: bool, own: str | None) -> charts.Point:
    """A variant as a point, by its ``own`` metric where it has one; its score is NaN where none was measured."""
    accuracy, timed = entry.get("accuracy") or {}, entry["latency"][0]
    score, bounds = _scored(accuracy, own)
    ratio = timed["speedup_ci95"]
    return charts.Point(
        name=label,
        time=1 / timed["speedup"],
        score=math.nan if score is None else score,
        size_mib=entry["size_mib"],
        time_bounds=(1 / ratio[1], 1 / ratio[0]) if ratio else None,
        score_bounds=None if is_reference else bounds,
    )


def _scored(accuracy: Mapping[str, Any], own: str | None) -> tuple[float | None, tuple[float, float] | None]:
    """What a variant is drawn at, and the interval that its change from the reference leaves it."""
    if own is not None:
        change = accuracy.get("metric_change_ci95")
        base = accuracy["metrics_reference"][own] if change else 0.0
        return accuracy["metrics"][own], (base + change[0], base + change[1]) if change else None
    drop, bounds = accuracy.get("top1_drop"), accuracy.get("top1_drop_ci95")
    if drop is None or not bounds or accuracy.get("top1") is None:
        return accuracy.get("top1", accuracy.get("agreement")), None
    base = accuracy["top1"] + drop
    return accuracy["top1"], (base - bounds[1], base - bounds[0])
