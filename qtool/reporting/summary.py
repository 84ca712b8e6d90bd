"""The verdict: one sentence per variant that says what was gained and what was lost, with its doubt.

A figure stands beside its 95 % interval, and a claim that the interval does not carry is not made: a
variant whose interval of the speed-up holds 1 is "as fast", whatever its point estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.reporting.numbers import changes, decibels, interval, percent, points, score
from qtool.units import many


def verdicts(result: Mapping[str, Any]) -> dict[str, str]:
    """One sentence for each variant of a benchmark result but the reference."""
    reference = result["reference"]
    return {name: _verdict(name, entry, result) for name, entry in result["variants"].items() if name != reference}


def _verdict(name: str, entry: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    threads = result["threads"]
    where = f"{result['provider']}, {many(threads, 'thread')}"
    gains = [size_phrase(entry["size_ratio"]), *(speed_phrase(timed) for timed in entry["latency"])]
    sentence = f"{name} against {result['reference']} ({where}): {', '.join(gains)}"
    accuracy = accuracy_phrase(entry.get("accuracy"))
    return f"{sentence}; {accuracy}." if accuracy else f"{sentence}."


def size_phrase(ratio: float) -> str:
    """``3.91x smaller`` for a size ratio of 0.256.

    >>> size_phrase(0.256), size_phrase(1.0)
    ('3.91x smaller', 'as large')
    """
    if abs(ratio - 1) < 0.02:
        return "as large"
    return f"{1 / ratio:.2f}x smaller" if ratio < 1 else f"{ratio:.2f}x larger"


def speed_phrase(timed: Mapping[str, Any]) -> str:
    """``2.60x faster (95 % CI 2.51 to 2.68) at batch size 1``."""
    ratio, bounds = timed["speedup"], timed["speedup_ci95"]
    at = f"at batch size {timed['batch_size']}"
    if not bounds:
        return f"{ratio:.2f}x the speed (too few runs for an interval) {at}"
    doubt = f"(95 % CI {interval(bounds)})"
    if bounds[0] > 1:
        return f"{ratio:.2f}x faster {doubt} {at}"
    if bounds[1] < 1:
        low, high = 1 / bounds[1], 1 / bounds[0]
        return f"{1 / ratio:.2f}x slower (95 % CI {interval((low, high))}) {at}"
    return f"as fast, {ratio:.2f}x {doubt} {at}"


def accuracy_phrase(accuracy: Mapping[str, Any] | None) -> str:
    """What the variant's outputs lost, or nothing where that was not measured."""
    if not accuracy:
        return ""
    parts = []
    if accuracy.get("agreement") is not None:
        parts.append(f"agreement {percent(accuracy['agreement'])}")
    if accuracy.get("top1_drop") is not None:
        bounds = interval(accuracy.get("top1_drop_ci95"), 100)
        parts.append(f"top-1 drop {points(accuracy['top1_drop'])}" + (f" (95 % CI {bounds})" if bounds else ""))
    parts += metric_phrases(accuracy)
    if not parts and accuracy.get("sqnr_db") is not None:
        parts.append(f"SQNR {decibels(accuracy['sqnr_db'])} dB")
    count = accuracy.get("num_samples")
    return ", ".join(parts) + (f" on {many(count, unit_of(accuracy.get('metrics')))}" if parts and count else "")


def unit_of(metrics: Mapping[str, Any] | None) -> str:
    """What figures count: tokens where a task measures perplexity.

    >>> unit_of({"perplexity": 22.5}), unit_of(None)
    ('token', 'sample')
    """
    return "token" if "perplexity" in (metrics or ()) else "sample"


def metric_phrases(accuracy: Mapping[str, Any]) -> list[str]:
    """The metric that decides of a task of its own, beside the reference's; nothing where none was measured.

    >>> figures = {"metric": "mae", "metrics": {"mae": 0.4123}, "metrics_reference": {"mae": 0.4}}
    >>> metric_phrases(figures | {"metric_change_ci95": (0.0101, 0.0145)})
    ['mae 0.412 against 0.400 (95 % CI of the change +0.0101 to +0.0145)']
    """
    name = accuracy.get("metric")
    values = [accuracy.get(key, {}).get(name) for key in ("metrics", "metrics_reference")]
    if None in values:
        return []
    told, wanted = (score(str(name), value) for value in values)
    bounds = changes(str(name), accuracy.get("metric_change_ci95"))
    return [f"{name} {told} against {wanted}" + (f" (95 % CI of the change {bounds})" if bounds else "")]


def caveats(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures has to know: what disturbed them, and what ran otherwise than asked."""
    noise = result["noise"]
    disturbed = [f"{'noisy machine' if noise['noisy'] else 'note'}: {reason}" for reason in noise["reasons"]]
    return [*result["notes"], *disturbed]


def compared(result: Mapping[str, Any]) -> list[str]:
    """What became of a comparison with earlier figures: a sentence, each figure that is worse, what was not compared.

    >>> compared({"comparison": {"with": "old.json", "regressions": [], "notes": ["another CPU"]}})
    ['compared with old.json: nothing is worse', 'another CPU']
    """
    if not (found := result.get("comparison")):
        return []
    worse = [each["told"] for each in found["regressions"]]
    told = f"{len(worse)} figure{'s are' if len(worse) > 1 else ' is'} worse" if worse else "nothing is worse"
    return [f"compared with {found['with']}: {told}", *worse, *found["notes"]]
