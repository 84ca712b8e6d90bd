"""What ``run.py`` found, as a table for the terminal or as Markdown: one row for each file.

A file's latency is told as the median and as the factor by which qtool's is faster, with its 95 % interval; above 1
qtool's is the faster. A dash is a figure that was not measured, or is a comparison with itself. A library that failed
has a row of dashes, and its own message below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.reporting.numbers import UNKNOWN, percent, significant

Found = Mapping[str, Any]
ERRORS = ("SQNR, dB", "KL, nats", "agreement")


def print_table(made: Found, found: Found, *, markdown: bool) -> None:
    """Prints the table, and a line for each library: its setting, or why it has no row."""
    heads, lines = head(found), [row(name, made, found) for name in found["benchmark"]["variants"]]
    failed = [name for name, told in made.items() if "failed" in told]
    lines += [[f"{name}: failed, see below", *[UNKNOWN] * (len(heads) - 1)] for name in failed]
    if markdown:
        print(f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|", sep="\n")
        print(*(f"| {' | '.join(cells)} |" for cells in lines), "", sep="\n")
    else:
        draw(heads, lines)
    print(*(f"- {note}" for note in notes(made, found)), sep="\n")


def head(found: Found) -> list[str]:
    """The columns: two for each batch size."""
    sizes = [timed["batch_size"] for timed in found["benchmark"]["variants"]["qtool"]["latency"]]
    timed = [text for size in sizes for text in (f"batch {size}, ms", "over qtool's")]
    return ["file", "MiB", *ERRORS, *timed, "seconds", "peak MiB"]


def row(name: str, made: Found, found: Found) -> list[str]:
    """One file's cells."""
    entry, cost, error = found["benchmark"]["variants"][name], made.get(name, {}), found["error"].get(name, {})
    errors = [significant(error.get("sqnr_db")), significant(error.get("kl")), percent(error.get("agreement"))]
    timed = [cell for figures in entry["latency"] for cell in latency(name, figures)]
    spent = [significant(cost.get(key), 2 if key == "seconds" else 4) for key in ("seconds", "peak_mib")]
    return [name, f"{entry['size_mib']:.2f}", *errors, *timed, *spent]


def latency(name: str, figures: Found) -> tuple[str, str]:
    """The median, and how many times qtool's it is with its interval."""
    median = significant(figures["latency_p50_ms"])
    if name == "qtool":
        return median, UNKNOWN
    low, high = figures["speedup_ci95"] or (figures["speedup"],) * 2
    return median, f"{1 / figures['speedup']:.2f}× ({1 / high:.2f} to {1 / low:.2f})"


def draw(heads: list[str], lines: list[list[str]]) -> None:
    """In the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads)
    for cells in lines:
        table.add_row(*cells)
    Console(width=150).print(table)


def notes(made: Found, found: Found) -> Iterator[str]:
    """What each row's setting is, what is not installed, what failed, and what disturbed the timing."""
    for name, told in made.items():
        if "absent" in told:
            yield f"`{name}` is not installed ({told['absent']}): `{told['install']}`"
        elif "failed" in told:
            yield f"`{name}` failed: {told['failed']}"
        else:
            yield f"`{name}`: {told['setting']} ({told['version']})"
    for reason in found["benchmark"]["noise"]["reasons"]:
        yield f"note: {reason}"
