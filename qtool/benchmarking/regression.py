"""One benchmark against an earlier one: what has become worse, beyond what measuring explains.

Each figure has a rule of its own, since they are not known equally well. Sizes and counts are exact.
Speed is compared as the speed-up over the reference measured beside it, which a change of machine or
load moves little: worse means that the two 95 % intervals lie apart *and* by more than the tolerance.
Times and memory in their own units are compared only on the same CPU with the same threads, and not
where either machine was noisy. Outputs are compared on the same number of samples of the same data, and what
is measured against the reference (speed-up, agreement, SQNR) where that is the same variant.

===================  ========================================================================
figure               worse when
===================  ========================================================================
size                 more than 1 % larger, without metadata
speed-up             the interval ends below the old one's begin by more than the tolerance
latency p50          more than the tolerance and three spreads slower; same CPU, both quiet
peak memory          more than 10 % and 1 MiB higher; same CPU
top-1, agreement     more than half a point lower
SQNR                 more than half a decibel lower, or finite where outputs were equal
a task's metric      more than 1 % of the old value worse, or undefined where it was not
integer operations   fewer of the multiplying operations run in INT8
===================  ========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtool.errors import ContractError, QtoolError, require_file
from qtool.stored import EACH, fault_of, is_decibels, is_number, is_text
from qtool.system.json_files import from_json
from qtool.units import many

Entry = Mapping[str, Any]
SIZE_TOLERANCE = 0.01
MEMORY_TOLERANCE = 0.10
HALF_A_POINT = 0.005
HALF_A_DECIBEL = 0.5
METRIC_TOLERANCE = 0.01


def _is_metric(value: Any) -> bool:
    return value is None or is_number(value)  # JSON has no other sign for NaN


def _is_interval(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(is_number, value)))


READ: dict[str, Any] = {
    "reference": is_text, "cpu": {"name": is_text}, "noise": {"noisy": is_number},
    "variants": {EACH: {
        "size_stripped_mib?": is_number, "peak_memory_mib?": is_number, "arithmetic?": {EACH: is_number},
        "latency": [{
            **dict.fromkeys(("batch_size", "latency_p50_ms", "speedup", "spread"), is_number),
            "speedup_ci95": _is_interval,
        }],
        "accuracy?": {
            **dict.fromkeys(("num_samples?", "top1?", "agreement?"), is_number), "sqnr_db?": is_decibels,
            "metrics?": {EACH: _is_metric},
        },
    }},
}  # fmt: skip
"""What a comparison reads of an earlier result and asks of that, each variant and each row of its latency alike."""


@dataclass(frozen=True)
class Regression:
    """A figure that is worse than it was: both values, and the limit that the new one is beyond."""

    variant: str
    figure: str
    old: float
    new: float
    limit: float

    def __str__(self) -> str:
        return f"{self.variant}: {self.figure} {self.new:.4g}, was {self.old:.4g} (limit {self.limit:.4g})"


def compare_with(old: Path, before: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """What became worse since ``before`` (read from ``old``), and what could not be compared, as plain values.

    Raises QtoolError where the two have no variant in common, or are known to be of two models.
    """
    require_same_model(old, before, new)
    require_common(old, before, new["variants"])
    worse = regressions(before, new, tolerance)
    return {
        "with": str(old),
        "tolerance": tolerance,
        "regressions": [asdict(found) | {"told": str(found)} for found in worse],
        "notes": differences(before, new),
    }


def require_same_model(old: Path, before: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises QtoolError where the figures in ``old`` and the new ones say that they are of two models.

    Models are compared by the last part of their specs: folders are others on another machine.
    """
    there, here = (Path(str(figures.get("model") or "")).name for figures in (before, new))
    if there and here and there != here:
        raise QtoolError(
            f"comparison with '{old}'", f"figures of the model '{here}'", f"those of '{there}'",
            "compare like with like",
        )  # fmt: skip


def require_common(old: Path, before: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises QtoolError where the figures in ``old`` have none of the variants ``names``."""
    if not set(names) & set(before["variants"]):
        there = ", ".join(before["variants"]) or "none"
        raise QtoolError(
            f"comparison with '{old}'", f"a variant of {', '.join(names)}", there, "compare like with like"
        )


def require_no_regression(result: Mapping[str, Any]) -> None:
    """Raises ContractError naming every figure of a benchmark result that became worse."""
    comparison = result.get("comparison")
    if comparison and comparison["regressions"]:
        error = ContractError(
            f"comparison with '{comparison['with']}'", "nothing worse than there",
            "; ".join(found["told"] for found in comparison["regressions"]),
            "find what changed, or accept it by comparing with a newer benchmark.json",
        )  # fmt: skip
        error.details = result
        raise error


def read_benchmark(path: Path) -> dict[str, Any]:
    """The figures of a ``benchmark.json``, or of what ``--json`` printed, be it of an INT8 file that is slower.

    Raises UsageError where there is no file, QtoolError for anything else.
    """
    require_file(path, "a benchmark.json", "give one that qtool benchmark wrote")
    try:
        value = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise QtoolError(f"'{path}'", "a benchmark.json", got, "give one that qtool benchmark wrote") from error
    value = value if isinstance(value, dict) else {}
    failure = value.get("error")
    figures: Any = failure.get("details") if isinstance(failure, dict) else value.get("metrics", value)
    fault = fault_of(figures, READ) if isinstance(figures, dict) else "without its figures"
    if fault:
        raise QtoolError(f"'{path}'", "a benchmark.json", f"JSON {fault}", "give one that qtool benchmark wrote")
    return dict(figures)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Sentences on why some figures were not compared."""
    notes = [
        f"{key}: {old.get(key)} then, {new.get(key)} now; speed was not compared"
        for key in ("provider", "threads", "device")
        if old.get(key) != new.get(key)
    ]
    if old["reference"] != new["reference"]:
        references = f"{old['reference']} then, {new['reference']} now"
        notes.append(f"reference: {references}; speed-ups, agreement and SQNR were not compared")
    if old["cpu"]["name"] != new["cpu"]["name"]:
        notes.append("another CPU: times and memory were not compared, only ratios")
    elif old["noise"]["noisy"] or new["noise"]["noisy"]:
        notes.append("a noisy machine: times were not compared, only ratios")
    if not _same_data(old, new):
        notes.append("other test data: outputs were not compared")
    common = [(entry, new["variants"][name]) for name, entry in old["variants"].items() if name in new["variants"]]
    if _same_data(old, new) and (counts := next(filter(None, (_counts(*pair) for pair in common)), None)):
        notes.append(f"outputs of {many(counts[0], 'sample')} then, of {counts[1]:,} now: they were not compared")
    then, now = ({timed["batch_size"] for pair in common for timed in pair[when]["latency"]} for when in (0, 1))
    for only, when in ((then - now, "then"), (now - then, "now")):
        if only:
            sizes = ", ".join(map(str, sorted(only)))
            notes.append(f"batch size {sizes} was timed only {when}: speed was not compared there")
    for one, other, when in ((old, new, "then and not now"), (new, old, "now and not then")):
        notes += [f"{name} was measured {when}" for name in one["variants"] if name not in other["variants"]]
    return notes


def _counts(before: Entry, after: Entry) -> tuple[int, int] | None:
    """How many samples a variant was judged on then and now, where these are two numbers."""
    then, now = ((entry.get("accuracy") or {}).get("num_samples") for entry in (before, after))
    return None if then is None or now is None or then == now else (then, now)


def _same_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """False where both know their data, and these are two."""
    return old.get("data") == new.get("data") or not (old.get("data") and new.get("data"))


def regressions(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> list[Regression]:
    """Every figure of a common variant that became worse, in the order of the module's table."""
    found: list[Regression] = []
    for name, after in new["variants"].items():
        before = old["variants"].get(name)
        if before is not None:
            found += [Regression(name, *worse) for worse in _of_variant(before, after, old, new, tolerance)]
    return found


Worse = tuple[str, float, float, float]


def _of_variant(
    before: Entry, after: Entry, old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float
) -> Iterator[Worse]:
    yield from _above("size, MiB", before, after, "size_stripped_mib", lambda v: v * (1 + SIZE_TOLERANCE))
    same = all(old.get(key) == new.get(key) for key in ("provider", "threads", "device"))
    same_cpu = same and old["cpu"]["name"] == new["cpu"]["name"]
    quiet = not (old["noise"]["noisy"] or new["noise"]["noisy"])
    same_reference = old["reference"] == new["reference"]
    for then, now in _same_batches(before, after):
        if same and same_reference:
            yield from _slower_ratio(then, now, tolerance)
        if same_cpu and quiet:
            yield from _slower_time(then, now, tolerance)
    if same_cpu:
        yield from _above(
            "peak memory, MiB", before, after, "peak_memory_mib", lambda v: v * (1 + MEMORY_TOLERANCE) + 1
        )
    if _same_data(old, new):
        yield from _of_outputs(before.get("accuracy") or {}, after.get("accuracy") or {}, same_reference)
    if same:
        yield from _fewer_integers(before.get("arithmetic") or {}, after.get("arithmetic") or {})


def _above(label: str, before: Entry, after: Entry, key: str, limit: Callable[[float], float]) -> Iterator[Worse]:
    old, new = before.get(key), after.get(key)
    if old is not None and new is not None and not new <= limit(old):
        yield label, old, new, limit(old)


def _below(label: str, before: Entry, after: Entry, key: str, slack: float) -> Iterator[Worse]:
    old, new = before.get(key), after.get(key)
    if old is not None and new is not None and not new >= old - slack:
        yield label, old, new, old - slack


def _same_batches(before: Entry, after: Entry) -> Iterator[tuple[Entry, Entry]]:
    earlier = {timed["batch_size"]: timed for timed in before["latency"]}
    for timed in after["latency"]:
        if timed["batch_size"] in earlier:
            yield earlier[timed["batch_size"]], timed


def _slower_ratio(then: Entry, now: Entry, tolerance: float) -> Iterator[Worse]:
    if not (then["speedup_ci95"] and now["speedup_ci95"]):
        return
    limit = then["speedup_ci95"][0] * (1 - tolerance)
    if now["speedup_ci95"][1] < limit:
        yield f"speed-up at batch size {now['batch_size']}", then["speedup"], now["speedup"], limit


def _slower_time(then: Entry, now: Entry, tolerance: float) -> Iterator[Worse]:
    slack = tolerance + 3 * max(then["spread"], now["spread"])
    limit = then["latency_p50_ms"] * (1 + slack)
    if now["latency_p50_ms"] > limit:
        label = f"latency p50 at batch size {now['batch_size']}, ms"
        yield label, then["latency_p50_ms"], now["latency_p50_ms"], limit


def _of_outputs(before: Entry, after: Entry, same_reference: bool) -> Iterator[Worse]:
    if before.get("num_samples") != after.get("num_samples"):
        return
    yield from _below("top-1", before, after, "top1", HALF_A_POINT)
    if same_reference:  # a reference is equal to itself, which is no measure of it against another
        yield from _below("agreement", before, after, "agreement", HALF_A_POINT)
        yield from _below("SQNR, dB", _unbounded(before), after, "sqnr_db", HALF_A_DECIBEL)
    yield from _of_metric(before, after)


def _unbounded(before: Entry) -> Entry:
    """An earlier result with the infinite SQNR of equal outputs, for which earlier versions had null."""
    equal = before.get("sqnr_db", 0.0) is None and before.get("agreement", 1) == 1
    return {**before, "sqnr_db": math.inf} if equal else before


def _of_metric(before: Entry, after: Entry) -> Iterator[Worse]:
    name = after.get("metric")
    then, now = before.get("metrics") or {}, after.get("metrics") or {}
    if name is None or before.get("metric") != name or name not in now or then.get(name) is None:
        return
    slack = METRIC_TOLERANCE * abs(then[name])
    yield from (
        _below(name, then, now, name, slack)
        if after["higher_is_better"]
        else _above(name, then, now, name, lambda old: old + slack)
    )


def _fewer_integers(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[Worse]:
    old, new = (ran.get("int8", 0) / max(1, sum(ran.values())) for ran in (before, after))
    if new < old:
        yield "share of INT8 operations", old, new, old
