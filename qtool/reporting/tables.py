"""A benchmark result as a table: variants side by side, one figure a row.

The rows are made once, as text; the terminal, Markdown and HTML only draw them. A row that no variant
has a value for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qtool.reporting.markdown import escaped, table
from qtool.reporting.numbers import UNKNOWN, changes, interval, percent, points, score, significant, times
from qtool.reporting.summary import caveats, compared, verdicts

if TYPE_CHECKING:
    from rich.console import Group

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure: its name with unit, and a cell for each variant."""

    label: str
    cells: tuple[str, ...]


def rows(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a benchmark result's table, in reading order."""
    entries = list(result["variants"].values())
    made = [_row(label, cell, entries) for label, cell in _FILE_ROWS]
    for index, timed in enumerate(entries[0]["latency"]):
        made += _timing_rows(timed["batch_size"], [entry["latency"][index] for entry in entries])
    accuracies = [_accuracy(name, entry, result["reference"]) for name, entry in result["variants"].items()]
    for name in _metrics(accuracies):
        made.append(_row(name, partial(_metric, name), accuracies))
        made.append(_row(f"{name} change, 95 % CI", partial(_change, name), accuracies))
    made += [_row(label.format(reference=result["reference"]), cell, accuracies) for label, cell in _ACCURACY_ROWS]
    made.append(_row("multiplying operations", _arithmetic, entries))
    return [row for row in made if any(cell != UNKNOWN for cell in row.cells)]


def _row(label: str, cell: Callable[[Entry], str], entries: list[Any]) -> Row:
    return Row(label, tuple(cell(entry) for entry in entries))


def _accuracy(name: str, entry: Entry, reference: str) -> Entry:
    """What was measured of a variant's outputs; of the reference only what is not a comparison with itself."""
    measured = entry.get("accuracy") or {}
    return {key: measured.get(key) for key in ("top1", "metric", "metrics")} if name == reference else measured


def _metrics(accuracies: list[Entry]) -> list[str]:
    """What a task of its own measures, what decides first; the loss only where it decides, or nothing else is there."""
    found = [each for each in accuracies if each.get("metrics")]
    names = list(dict.fromkeys(name for each in found for name in (each["metric"], *each["metrics"])))
    shown = [name for name in names if name != "loss" and not (name == "top1" and _has_top1(accuracies))]
    return shown if shown and names[0] != "loss" else names[:1]


def _has_top1(accuracies: list[Entry]) -> bool:
    return any(each.get("top1") is not None for each in accuracies)


def _metric(name: str, accuracy: Entry) -> str:
    return score(name, (accuracy.get("metrics") or {}).get(name))


def _change(name: str, accuracy: Entry) -> str:
    decides = accuracy.get("metric") == name
    return (changes(name, accuracy.get("metric_change_ci95")) if decides else "") or UNKNOWN


def _smaller(entry: Entry) -> str:
    ratio = entry.get("size_ratio")
    return times(1 / ratio) if ratio and ratio != 1 else UNKNOWN


_FILE_ROWS: tuple[tuple[str, Callable[[Entry], str]], ...] = (
    ("size on disk, MiB", lambda e: significant(e["size_mib"])),
    ("without metadata, MiB", lambda e: significant(e["size_stripped_mib"])),
    ("smaller by", _smaller),
    ("compressed, MiB", lambda e: significant(e["size_compressed_mib"])),
    ("load time, ms", lambda e: significant(e["load_ms"])),
    ("peak memory, MiB", lambda e: significant(e["peak_memory_mib"])),
)


def _timing_rows(batch_size: int, timed: list[Entry]) -> list[Row]:
    at = f"batch {batch_size}"
    cells: tuple[tuple[str, Callable[[Entry], str]], ...] = (
        (f"{at}: latency p50, ms", lambda t: significant(t["latency_p50_ms"])),
        (f"{at}: p90 / p99, ms", lambda t: " / ".join(significant(t[f"latency_p{p}_ms"]) for p in (90, 99))),
        (f"{at}: speed-up", _speedup),
        (f"{at}: 95 % CI", _settled),
        (f"{at}: speed-up, typical", _typical),
        (f"{at}: samples per s", lambda t: significant(t["throughput_per_s"])),
    )
    return [_row(label, cell, timed) for label, cell in cells]


def _is_reference(timed: Entry) -> bool:
    return timed["speedup_ci95"] is None and timed["speedup"] == 1.0


def _speedup(timed: Entry) -> str:
    return UNKNOWN if _is_reference(timed) else times(timed["speedup"])


def _typical(timed: Entry) -> str:
    unknown = _is_reference(timed) or "speedup_typical" not in timed  # a result of before it was kept
    return UNKNOWN if unknown else times(timed["speedup_typical"])


def _settled(timed: Entry) -> str:
    bounds = timed["speedup_ci95"]
    return UNKNOWN if bounds is None else interval(bounds) + ("" if timed["converged"] else " *")


_ACCURACY_ROWS: tuple[tuple[str, Callable[[Entry], str]], ...] = (
    ("top-1", lambda a: percent(a.get("top1"))),
    ("top-1 drop, points", lambda a: points(a.get("top1_drop")).removesuffix(" points")),
    ("drop, 95 % CI", lambda a: interval(a.get("top1_drop_ci95"), 100) or UNKNOWN),
    ("agreement with {reference}", lambda a: percent(a.get("agreement"))),
    ("KL divergence, nats", lambda a: significant(a.get("kl"), 2)),
    ("SQNR, dB", lambda a: significant(a.get("sqnr_db"))),
)


def _arithmetic(entry: Entry) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in entry.get("arithmetic", {}).items()) or UNKNOWN


def unsettled(result: Mapping[str, Any]) -> str:
    """The footnote of a speed-up marked with a star, or nothing."""
    marked = any(not timed["converged"] for entry in result["variants"].values() for timed in entry["latency"])
    return "* the interval is wider than was asked for: give more time with --seconds" if marked else ""


def _foot(result: Mapping[str, Any]) -> list[str]:
    """The sentences below a table."""
    return [text for text in (unsettled(result), *compared(result), *caveats(result)) if text]


def markdown(result: Mapping[str, Any]) -> str:
    """The table and its verdicts as Markdown, for a pull request."""
    lines = [*map(escaped, verdicts(result).values()), ""]
    lines += table(["", *result["variants"]], [[row.label, *row.cells] for row in rows(result)], right=True)
    foot = [f"- {escaped(text)}" for text in _foot(result)]
    return "\n".join([*lines, *([""] if foot else []), *foot]) + "\n"


def terminal(result: Mapping[str, Any]) -> Group:
    """The same for a terminal: a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    figures = Table(box=None, pad_edge=False, header_style="bold")
    figures.add_column("", overflow="fold")
    for name in result["variants"]:
        figures.add_column(name, justify="right", no_wrap=False)
    for row in rows(result):
        figures.add_row(row.label, *row.cells)
    foot = _foot(result)
    below = [Text(""), *(Text(text, style="bold") for text in verdicts(result).values())]
    return Group(figures, *below, *(Text(text, style="dim") for text in foot))
