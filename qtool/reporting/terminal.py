"""Results on a terminal: a few lines for each stage, the table for a benchmark, and an outline of anything else.

Numbers come from the result alone, so that what is printed after a run and what is printed from its
files later are the same.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qtool.errors import one_line
from qtool.reporting.chosen import chosen_sentence
from qtool.reporting.contracts import advice, contract_sentence, gate_verdict
from qtool.reporting.ladder import ladder_lines
from qtool.reporting.memory import memory_lines, numerics_lines
from qtool.reporting.numbers import UNKNOWN, decibels, interval, percent, points, score, significant
from qtool.reporting.summary import metric_phrases, size_phrase, unit_of
from qtool.reporting.tables import terminal
from qtool.source import has_random_weights
from qtool.units import MIB, many

Result = Mapping[str, Any]
WIDE = 1000
"""Columns where nobody looks at a terminal."""


def show(kind: str, result: Result) -> None:
    """Prints the result of a stage, of a whole run or of an inspection to standard output.

    To a terminal as wide as that is; to a file or another program each sentence in one line.
    """
    from rich.console import Console

    console = Console(highlight=False, emoji=False)  # names hold colons: 'npz:x:32' has no cross in it
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    for item in STAGES[kind](result):
        console.print(item, markup=False)


def train_lines(result: Result) -> Iterator[Any]:
    """How well the trained model does, and what it took."""
    metrics, history = result["metrics"], result.get("history")
    if metrics:
        counted = {"top1", "perplexity"} & metrics.keys()  # a task of one's own weighs batches by what it likes
        count = many(round(metrics["num_samples"]), f"test {unit_of(metrics)}") if counted else "the test data"
        yield f"train: {scores(metrics)} on {count}"
    yield from _split(result)
    if history:
        yield f"  {_done(history)}"
    if memory := result.get("memory"):
        yield f"  {chosen_sentence(memory, (history or {}).get('halvings', 0))}"


def _done(history: Result) -> str:
    """How long a training was."""
    early = ", stopped early" if history["stopped_early"] else ""
    skipped = f", {history['skipped_steps']} skipped" if history["skipped_steps"] else ""
    return f"{many(len(history['epochs']), 'epoch')}, {many(len(history['losses']), 'step')}{skipped}{early}"


def _tuned(history: Result) -> str:
    """How long QAT was, and how well its last epoch did, or the best where that is what is kept."""
    epochs, best = history["epochs"], history["best_epoch"]
    last = (epochs[-1] if best is None else epochs[best]) if epochs else {}
    names = [name for name in last if name.startswith("validation_")]
    found = scores({name.removeprefix("validation_"): last[name] for name in names})
    return f"trained for {_done(history)}" + (f": {found} on validation data" if found else "")


def _split(result: Result) -> Iterator[str]:
    """What is to be said of the data's parts."""
    if told := result.get("source", {}).get("split"):
        yield f"  data: {told}"


def scores(metrics: Result) -> str:
    """Metrics as words.

    >>> scores({"num_samples": 10.0, "loss": 0.25, "top1": 0.9})
    'loss 0.250, top1 90.0 %'
    """
    return ", ".join(f"{name} {score(name, value)}" for name, value in metrics.items() if name != "num_samples")


def quantize_lines(result: Result) -> Iterator[Any]:
    """What became integer, and what stayed in float for which reason."""
    units = result["plan"]["units"]
    floats = [unit for unit in units if not unit["integer"]]
    mode, drawn = result["config"]["mode"], result["calibration"]
    yield f"quantize: {mode} for {result['plan']['target']}, {len(units) - len(floats)} of {len(units)} units integer"
    if drawn.get("num_samples"):
        yield f"  calibrated on {many(drawn['num_samples'], 'sample')} ({drawn['spec']}, seed {drawn['seed']})"
    if history := result.get("history"):
        yield f"  {_tuned(history)}"
    yield from _split(result)
    if has_random_weights(result.get("source", {})):
        yield f"  '{result['source']['model']}' has random weights: name trained ones with --weights"
    told = (f"{'from stored integers' if u.get('block') else 'in float'}: {u['reason']}" for u in floats)
    for reason, count in Counter(re.sub("its operand '[^']*'", "an operand", text) for text in told).items():
        yield f"  {count} {reason}"
    yield from (f"  note: {note}" for note in result["plan"]["notes"])
    if outcome := result.get("contract"):
        yield f"  {contract_sentence(outcome)}"


def sensitivity_lines(result: Result) -> Iterator[Any]:
    """A table of units, the most harmful first: SQNR, KL divergence and agreement with only that unit quantized."""
    from rich.table import Table

    guessed = any(unit.get("measured") == "second-order" for unit in result["units"])
    how = "each quantized alone, estimated to second order" if guessed else "each quantized alone"
    yield f"sensitivity: {many(len(result['units']), 'unit')}, {how}, on {many(result['num_samples'], 'sample')}"
    table = Table("unit", "kind", box=None, pad_edge=False)
    for name in ("SQNR, dB", "KL, nats", "agreement"):
        table.add_column(name, justify="right")
    for unit in result["units"]:
        noise = decibels(unit["sqnr_db"])
        kl = UNKNOWN if unit["kl"] is None else significant(unit["kl"], 2)
        agreement = UNKNOWN if unit["agreement"] is None else percent(unit["agreement"])
        table.add_row(unit["name"], unit["kind"], noise, kl, agreement)
    yield table


def export_lines(result: Result) -> Iterator[Any]:
    """The files with their sizes, a table of what each gate found, and what tuning did."""
    from rich.table import Table

    files = sorted(result["outputs"].values(), key=lambda entry: -entry["size_bytes"])
    reference = result["outputs"].get("fp32")
    for entry in files:
        told = f"export: {entry['file']}, {entry['size_bytes'] / MIB:.3f} MiB on disk"
        if reference and entry is not reference:
            phrase = size_phrase(entry["size_bytes"] / reference["size_bytes"])
            told += f", {phrase} {'as' if phrase == 'as large' else 'than'} FP32"
        yield told
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for gate in result["metrics"]["gates"]:
        table.add_row(f"  {gate['name']}", gate_verdict(gate), gate["found"])
    if table.row_count:
        yield table
    if tuning := result["metrics"].get("tuning"):
        yield f"  tuning: {tuning['verdict']}"
        for group in tuning["groups"]:
            yield f"    {group['name']}: {group['reason']}"


def benchmark_lines(result: Result) -> Iterator[Any]:
    """The table of variants side by side."""
    figures = result["metrics"]
    yield terminal(figures) if figures.get("variants") else "benchmark: no figures in it; run 'qtool benchmark' again"


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
        yield from (f"{name}: {text}" for text in variant.get("missing", ()))
    yield f"report: {result['run']}/report.json"


def _int8_accuracy(variant: Result) -> Result | None:
    found: Result = variant.get("benchmark", {}).get("metrics", {}).get("variants", {}).get("int8", {})
    return found.get("accuracy")


def against_float(accuracy: Result) -> str:
    """INT8 against FP32 in one line: agreement, KL divergence, the drop of top-1, a task's metric; or else SQNR."""
    parts = []
    if accuracy.get("agreement") is not None:
        parts.append(f"agreement with FP32 {percent(accuracy['agreement'])}")
    if accuracy.get("kl") is not None:
        parts.append(f"KL {significant(accuracy['kl'], 2)} nats")
    if accuracy.get("top1_drop") is not None:
        bounds = interval(accuracy["top1_drop_ci95"], 100)
        parts.append(f"top-1 drop {points(accuracy['top1_drop'])} (95 % CI {bounds})")
    parts += metric_phrases(accuracy)
    if not parts:
        parts.append(f"SQNR {significant(accuracy['sqnr_db'])} dB")
    unit = unit_of(accuracy.get("metrics"))
    return f"{', '.join(parts)}, on {many(accuracy['num_samples'], f'test {unit}')}"


def report_lines(result: Result) -> Iterator[Any]:
    """Where the page and the summary are, what became of contracts, and what is missing."""
    yield from (f"{name}: {path}" for name, path in result["files"].items())
    yield from (f"{name}: {contract_sentence(outcome)}" for name, outcome in result["contracts"].items())
    yield from result["notes"]


def inspect_lines(result: Result) -> Iterator[Any]:
    """A run directory as its stages' lines and a table of its units; a file as an outline."""
    if "run" not in result:
        yield from outline(result)
        return
    yield f"── {result['run']} ──"
    made = [stage for stage in ("train", "quantize", "export", "benchmark") if stage in result]
    told = [result[name] for name in (*made, "contract") if name in result]
    if (source := next((each["source"] for each in told if "source" in each), None)) is not None:
        model, data = (source.get(key) or "given as an object" for key in ("model", "data"))
        yield f"model {model}, data {data}"
    for stage in made:
        yield from STAGES[stage](result[stage])
        if "stale" in result[stage]:
            yield f"  stale: {result[stage]['stale']}"
        if stage == "quantize":
            yield _units_table(result["units"])
    if outcome := result.get("contract"):
        yield contract_sentence(outcome)
        yield advice(outcome)
    yield from result.get("notes", ())
    if made:
        environment = result[made[-1]]["environment"]
        packages = environment["packages"]
        named = ", ".join(f"{name} {packages[name]}" for name in ("qtool", "torch") if name in packages)
        yield f"made with {named}, Python {environment['python']}, on {environment['cpu']['name']}"
    for variant in result.get("variants", {}).values():
        yield ""
        yield from inspect_lines(variant)


def _units_table(units: Sequence[Result]) -> Any:
    """What each unit runs in, the range of its output, and what quantizing it alone costs where that was measured."""
    from rich.table import Table

    measured = any(unit["kl"] is not None for unit in units)
    table = Table("unit", "kind", "runs in", box=None, pad_edge=False)
    for name in ("output range", *(("SQNR alone, dB",) if measured else ())):
        table.add_column(name, justify="right")
    for unit in units:
        bits = f"int{unit['weight_bits'] or 8}" if unit["integer"] else "float"
        if unit["weight_bits"] and not unit["integer"]:
            bits = f"{'as stored' if unit['block'] else 'float'}, int{unit['weight_bits']} weights"
        span = UNKNOWN if unit["low"] is None else f"{unit['low']:.3g} to {unit['high']:.3g}"
        noise = [decibels(unit["sqnr_db"])] if measured else []
        table.add_row(unit["name"], unit["kind"], bits, span, *noise)
    return table


def outline(value: Any, depth: int = 0) -> Iterator[str]:
    """Nested values as indented lines, what is short kept on one."""
    for key, item in value.items():
        if isinstance(item, Mapping) and len(_inline(item)) > 90 - 2 * depth:
            yield f"{'  ' * depth}{_inline(key)}:"
            yield from outline(item, depth + 1)
        else:
            yield f"{'  ' * depth}{_inline(key)}: {_inline(item)}"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_inline(key)} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else _printable(one_line(value))


def _printable(text: str) -> str:
    """Text of a file without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


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
