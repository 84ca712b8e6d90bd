"""Results on a terminal: a few lines for each stage, the table for a benchmark, and an outline of anything else.

Numbers come from the result alone, so that what is printed after a run and what is printed from its
files later are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtool.reporting.contracts import contract_sentence
from qtool.reporting.ladder import ladder_lines
from qtool.reporting.memory import memory_lines, numerics_lines
from qtool.reporting.numbers import UNKNOWN, interval, percent, points, significant
from qtool.reporting.tables import terminal

Result = Mapping[str, Any]
MIB = 2**20


def show(kind: str, result: Result) -> None:
    """Prints the result of a stage, of a whole run or of an inspection to standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    for item in STAGES[kind](result):
        console.print(item, markup=False)


def train_lines(result: Result) -> Iterator[Any]:
    """How well the trained model does, and what it took."""
    metrics, history = result["metrics"], result.get("history")
    unit = "tokens" if "perplexity" in metrics else "samples"
    if metrics:
        yield f"train: {scores(metrics)} on {metrics['num_samples']:,.0f} test {unit}"
    if history:
        early = ", stopped early" if history["stopped_early"] else ""
        skipped = f", {history['skipped_steps']} skipped" if history["skipped_steps"] else ""
        yield f"  {len(history['epochs'])} epochs, {len(history['losses'])} steps{skipped}{early}"


def scores(metrics: Result) -> str:
    """Metrics as words: shares of samples as percentages, the rest as numbers.

    >>> scores({"num_samples": 10.0, "loss": 0.25, "top1": 0.9})
    'loss 0.25, top1 90.0 %'
    """
    shares = ("top1", "top5", "accuracy")
    named = ((k, v) for k, v in metrics.items() if k != "num_samples")
    return ", ".join(f"{k} {percent(v) if k in shares else significant(v)}" for k, v in named)


def quantize_lines(result: Result) -> Iterator[Any]:
    """What became integer, and what stayed in float for which reason."""
    units = result["plan"]["units"]
    floats = [unit for unit in units if not unit["integer"]]
    mode, drawn = result["config"]["mode"], result["calibration"]
    yield f"quantize: {mode} for {result['plan']['target']}, {len(units) - len(floats)} of {len(units)} units integer"
    if drawn.get("num_samples"):
        yield f"  calibrated on {drawn['num_samples']} samples ({drawn['spec']}, seed {drawn['seed']})"
    for reason, count in Counter(re.sub("its operand '[^']*'", "an operand", u["reason"]) for u in floats).items():
        yield f"  {count} in float: {reason}"
    yield from (f"  note: {note}" for note in result["plan"]["notes"])
    if outcome := result.get("contract"):
        yield f"  {contract_sentence(outcome)}"


def sensitivity_lines(result: Result) -> Iterator[Any]:
    """A table of units, the most harmful first: SQNR, KL divergence and agreement with only that unit quantized."""
    from rich.table import Table

    guessed = any(unit.get("measured") == "second-order" for unit in result["units"])
    how = "each quantized alone, estimated to second order" if guessed else "each quantized alone"
    yield f"sensitivity: {len(result['units'])} units, {how}, on {result['num_samples']} samples"
    table = Table("unit", "kind", box=None, pad_edge=False)
    for name in ("SQNR, dB", "KL, nats", "agreement"):
        table.add_column(name, justify="right")
    for unit in result["units"]:
        noise = "none" if unit["sqnr_db"] is None else f"{unit['sqnr_db']:.1f}"
        kl = UNKNOWN if unit["kl"] is None else significant(unit["kl"], 2)
        agreement = UNKNOWN if unit["agreement"] is None else percent(unit["agreement"])
        table.add_row(unit["name"], unit["kind"], noise, kl, agreement)
    yield table


def export_lines(result: Result) -> Iterator[Any]:
    """The files with their sizes, and what each gate found."""
    for entry in result["outputs"].values():
        yield f"export: {entry['file']}, {entry['size_bytes'] / MIB:.3f} MiB"
    for gate in result["metrics"]["gates"]:
        yield f"  gate {gate['name']}: {_inline(gate)}"
    if tuning := result["metrics"].get("tuning"):
        yield f"  tuning: {tuning['verdict']}"
        for group in tuning["groups"]:
            yield f"    {group['name']}: {group['reason']}"


def benchmark_lines(result: Result) -> Iterator[Any]:
    """The table of variants side by side."""
    yield terminal(result["metrics"])


def run_lines(result: Result) -> Iterator[Any]:
    """The one summary of a run: the training, then each variant's table, then the verdict on accuracy."""
    if "train" in result:
        yield from train_lines(result["train"])
    for name, variant in result.get("variants", {}).items():
        yield ""
        yield f"── {name} ── {variant['run']}"
        if "benchmark" in variant:
            yield from benchmark_lines(variant["benchmark"])
    yield ""
    for name, variant in result.get("variants", {}).items():
        if accuracy := _int8_accuracy(variant):
            yield f"{name}: {against_float(accuracy)}"
    yield f"report: {result['run']}/report.json"


def _int8_accuracy(variant: Result) -> Result | None:
    found: Result = variant.get("benchmark", {}).get("metrics", {}).get("variants", {}).get("int8", {})
    return found.get("accuracy")


def against_float(accuracy: Result) -> str:
    """INT8 against FP32 in one line: agreement, KL divergence, and the drop of top-1 with its interval."""
    parts = [f"agreement with FP32 {percent(accuracy['agreement'])}", f"KL {significant(accuracy['kl'], 2)} nats"]
    if accuracy.get("top1_drop") is not None:
        bounds = interval(accuracy["top1_drop_ci95"], 100)
        parts.append(f"top-1 drop {points(accuracy['top1_drop'])} (95 % CI {bounds})")
    return f"{', '.join(parts)}, on {accuracy['num_samples']:,} test samples"


def report_lines(result: Result) -> Iterator[Any]:
    """Where the page and the summary are, and what became of contracts."""
    yield from (f"{name}: {path}" for name, path in result["files"].items())
    yield from (f"{name}: {contract_sentence(outcome)}" for name, outcome in result["contracts"].items())


def inspect_lines(result: Result) -> Iterator[Any]:
    """An outline of whatever was found; a benchmark in it is drawn as its table."""
    yield from outline({key: value for key, value in result.items() if key not in ("benchmark", "variants")})
    if "benchmark" in result:
        yield from benchmark_lines(result["benchmark"])
    for name, variant in result.get("variants", {}).items():
        yield f"── {name} ──"
        yield from inspect_lines(variant)


def outline(value: Any, depth: int = 0) -> Iterator[str]:
    """Nested values as indented lines, what is short kept on one."""
    for key, item in value.items():
        if isinstance(item, Mapping) and len(_inline(item)) > 90 - 2 * depth:
            yield f"{'  ' * depth}{key}:"
            yield from outline(item, depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {_inline(item)}"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


STAGES: dict[str, Callable[[Result], Iterator[Any]]] = {
    "train": train_lines,
    "quantize": quantize_lines,
    "sensitivity": sensitivity_lines,
    "export": export_lines,
    "benchmark": benchmark_lines,
    "run": run_lines,
    "inspect": inspect_lines,
    "report": report_lines,
    "memory": memory_lines,
    "ladder": ladder_lines,
    "numerics": numerics_lines,
}
