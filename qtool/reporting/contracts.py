"""An accuracy contract's outcome in words, as a table and, where it was not kept, as pictures of what stood in the way.

What was promised, what was found, by which candidate; what was lost against size and time; which units hurt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtool.reporting.markdown import escaped, table
from qtool.reporting.markup import Markup
from qtool.reporting.numbers import UNKNOWN, times
from qtool.reporting.tradeoff import Candidate, tradeoff
from qtool.units import MIB, figure, many

UNITS = {"drop": "points", "agreement": "%", "KL": "nats"}


def contract_sentence(outcome: Mapping[str, Any]) -> str:
    """Whether the contract is kept, by what, how surely, and on how many samples."""
    found = "; ".join(_criterion(c, outcome) for c in outcome["criteria"])
    kept = "kept by" if outcome["met"] else "not kept; closest is"
    tried = many(len(outcome["trials"]), "candidate")
    return f"contract {kept} '{outcome['chosen']}': {found}, on {many(outcome['num_samples'], 'sample')}, after {tried}"


def _criterion(criterion: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    sign, unit = ("≥" if criterion["name"] == "agreement" else "≤"), UNITS[criterion["name"]]
    limit = f"{_promised(criterion, outcome)} {sign} {criterion['limit']:g} {unit}"
    return f"{limit}, measured {_measured(criterion)}"


def _promised(criterion: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    """What a criterion is of: the drop of a metric, where that is recorded, or the rise of one that is an error."""
    metric = outcome.get("metric") if criterion["name"] == "drop" else None
    change = "drop" if outcome.get("higher_is_better", True) else "rise"
    return f"{change} of {metric}" if metric else str(criterion["name"])


def _measured(criterion: Mapping[str, Any]) -> str:
    most = 100 if criterion["name"] == "agreement" else math.inf
    ends = (criterion["value"], *criterion["ci95"])
    value, low, high = (UNKNOWN if end is None else figure(end, most) for end in ends)
    return f"{value} (95 % CI {low} to {high})"


def contract_table(outcome: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Header and rows: every candidate with what was measured of it, its size and its speed."""
    names = [f"{_promised(c, outcome)}, {UNITS[c['name']]}" for c in outcome["criteria"]]
    body: list[list[object]] = []
    for trial in outcome["trials"]:
        cells = [_measured(criterion) for criterion in trial["criteria"]]
        speed = times(trial["speedup"]) if trial["speedup"] else UNKNOWN
        body.append([trial["name"], *cells, f"{trial['size_bytes'] / MIB:.3f}", trial["num_float_units"], speed])
    return ["candidate", *names, "size, MiB", "units in float", "speed"], body


def advice(outcome: Mapping[str, Any]) -> str:
    """What stood in the way of a contract that was not kept, and what would help."""
    worst = ", ".join(unit["name"] for unit in outcome["harmful"][:3])
    units = f"Most harm comes from {worst}. " if worst else ""
    needed = max((c["needed"] or 0 for c in outcome["criteria"]), default=0)
    if outcome.get("out_of_time"):
        return f"{units}The time was used up: with more of it the search goes on where it stopped."
    if needed and all(c["met"] or c["needed"] for c in outcome["criteria"]):
        return (
            f"{units}The value found is within the limit, but the samples are too few to tell: give about {needed:,}."
        )
    more = "give labelled training data" if outcome["method"] == "auto" else "allow more by --method auto"
    return f"{units}Promise less, {'' if outcome.get('trained') else f'{more}, '}or look at those units."


def tradeoffs(outcome: Mapping[str, Any]) -> Iterator[tuple[Markup, str]]:
    """Pictures with their captions: the criterion that is furthest from kept, against size, and against time."""
    index = next((i for i, c in enumerate(outcome["criteria"]) if not c["met"]), 0)
    criterion = outcome["criteria"][index]
    label = f"{_promised(criterion, outcome)}, {UNITS[criterion['name']]}"
    more = criterion["name"] == "agreement"
    size = "Every candidate's size and what it loses; the dashed steps are those that none beats in both."
    time = "The same against time in ONNX Runtime, FP32 = 1, where it was measured."
    costs: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], str], ...] = (
        ("size, MiB", _size, size), ("time, FP32 = 1", _time, time),
    )  # fmt: skip
    for cost, told, caption in costs:
        shown = [_candidate(trial, index, told(trial)) for trial in outcome["trials"]]
        found = [candidate for candidate in shown if candidate is not None]
        if len(found) > 1:
            yield tradeoff(found, criterion["limit"], cost, label, more_is_better=more), caption


def _candidate(trial: Mapping[str, Any], index: int, cost: float | None) -> Candidate | None:
    """A trial as a mark; None where its value is not finite or its cost is not known."""
    criterion = trial["criteria"][index]
    if cost is None or criterion["value"] is None:
        return None
    low, high = criterion["ci95"]
    return Candidate(trial["name"], cost, criterion["value"], None if low is None or high is None else (low, high))


def _size(trial: Mapping[str, Any]) -> float | None:
    return float(trial["size_bytes"]) / MIB


def _time(trial: Mapping[str, Any]) -> float | None:
    return 1 / trial["speedup"] if trial["speedup"] else None


def contract_markdown(outcome: Mapping[str, Any]) -> str:
    """The outcome as Markdown: the sentence, the advice where it was not kept, the table of candidates, the notes."""
    told = [contract_sentence(outcome), *([] if outcome["met"] else [advice(outcome)])]
    lines = [line for text in told for line in (escaped(text), "")] + table(*contract_table(outcome))
    return "\n".join([*lines, *(f"\n{escaped(note)}" for note in outcome.get("notes", ()))]) + "\n"


def gate_verdict(gate: Mapping[str, Any]) -> str:
    """What became of an export's gate, in a word or two; "told" where it found something that fails nothing.

    >>> [gate_verdict({"passed": value}) for value in (True, False, None)]
    ['passed', 'failed', 'not run']
    >>> gate_verdict({"passed": None, "details": {"beyond": {"add": 7e4}}})
    'told'
    """
    if (passed := gate.get("passed")) is None:
        return "told" if any((gate.get("details") or {}).values()) else "not run"
    return "passed" if passed else "failed"
