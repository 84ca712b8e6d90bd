"""An accuracy contract's outcome in words and as a table: what was promised, what was found, by which candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.reporting.numbers import UNKNOWN, times

UNITS = {"drop": "points", "agreement": "%", "KL": "nats"}


def contract_sentence(outcome: Mapping[str, Any]) -> str:
    """Whether the contract is kept, by what, how surely, and on how many samples."""
    found = "; ".join(_criterion(c) for c in outcome["criteria"])
    kept = "kept by" if outcome["met"] else "not kept; closest is"
    tried = f"{len(outcome['trials'])} candidate{'s' if len(outcome['trials']) > 1 else ''}"
    return f"contract {kept} '{outcome['chosen']}': {found}, on {outcome['num_samples']:,} samples, after {tried}"


def _criterion(criterion: Mapping[str, Any]) -> str:
    sign, unit = ("≥" if criterion["name"] == "agreement" else "≤"), UNITS[criterion["name"]]
    limit = f"{criterion['name']} {sign} {criterion['limit']:g} {unit}"
    return f"{limit}, measured {_measured(criterion)}"


def _measured(criterion: Mapping[str, Any]) -> str:
    low, high = (UNKNOWN if end is None else f"{end:.3g}" for end in criterion["ci95"])
    value = UNKNOWN if criterion["value"] is None else f"{criterion['value']:.3g}"
    return f"{value} (95 % CI {low} to {high})"


def contract_table(outcome: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Header and rows: every candidate with what was measured of it, its size and its speed."""
    names = [f"{c['name']}, {UNITS[c['name']]}" for c in outcome["criteria"]]
    body: list[list[object]] = []
    for trial in outcome["trials"]:
        cells = [_measured(criterion) for criterion in trial["criteria"]]
        speed = times(trial["speedup"]) if trial["speedup"] else UNKNOWN
        body.append([trial["name"], *cells, f"{trial['size_bytes'] / 2**20:.3f}", trial["num_float_units"], speed])
    return ["candidate", *names, "size, MiB", "units in float", "speed"], body
