"""What a training chose for its memory, and why: a sentence, and the table of what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.reporting.markdown import escaped, table
from qtool.reporting.numbers import UNKNOWN, significant
from qtool.units import MIB, many


def chosen_sentence(memory: Mapping[str, Any], halvings: int = 0) -> str:
    """What was asked for and what was chosen, at which predicted peak; how often micro-batches were halved since."""
    peak, limit = (significant(memory[key] / MIB) for key in ("predicted_peak_bytes", "limit_bytes"))
    count, times = len(memory["considered"]), many(halvings, "time")
    why = f"{memory['flags'] or 'nothing changed'}, {memory['why']}"
    then = f"; micro-batches halved {times}, memory having run out" if halvings else ""
    predicted = f"predicted peak {peak} of {limit} MiB, {many(count, 'prediction')}"
    return f"{memory['asked']}: {why}; {predicted}{then}"


def chosen_rows(memory: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of all combinations that were predicted, in that order."""
    rows = []
    for one in memory["considered"]:
        peak = one["predicted_peak_bytes"]
        fits = "refused" if peak is None else "yes" if peak <= memory["limit_bytes"] else "no"
        rows.append([one["flags"] or "as given", UNKNOWN if peak is None else significant(peak / MIB), fits])
    return ["flags", "predicted peak, MiB", "fits"], rows


def chosen_markdown(memory: Mapping[str, Any], halvings: int = 0) -> str:
    """Both as Markdown."""
    return "\n".join([escaped(chosen_sentence(memory, halvings)), "", *table(*chosen_rows(memory)), ""])
