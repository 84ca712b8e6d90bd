"""Memory and number formats on a terminal: predicted and measured peaks, arithmetic, what formats store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qtool.reporting.numbers import UNKNOWN, significant
from qtool.units import bytes_told, many

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]
WIDTHS = ("32-bit", "16-bit", "8-bit", "4-bit")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table: the first column to the left, and broken where there is little room; figures to the right."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        made.add_column(head, justify="right" if index else "left", no_wrap=index > 0)
    for row in rows:
        made.add_row(*row)
    return made


def memory_lines(result: Result) -> Iterator[Any]:
    """The answer of ``qtool memory``: from arithmetic, or predicted for a model, with what was measured."""
    yield from _arithmetic(result) if "num_params" in result else _predicted(result)


def _predicted(result: Result) -> Iterator[Any]:
    found = result["predicted"]
    where = f" in {found['module']}" if found["module"] else ""
    peak = bytes_told(found["peak_bytes"])
    yield f"memory: predicted peak {peak} on {found['device']}, in the {found['moment']}{where}"
    rows = [(name.replace("_", " "), bytes_told(value)) for name, value in found["parts"].items()]
    yield table(("at the peak", ""), [*rows, ("total", peak)])
    if (seen := found.get("largest_of", 1)) > 1:
        shapes = ", ".join("×".join(map(str, shape)) for shape in found["inputs"])
        yield f"batches differ: this is the largest of {seen} that were looked at ({shapes}); a larger one takes more"
    if late := found.get("late_bytes"):
        yield f"up to {bytes_told(late)} more at moments on a busy CPU, in exchanges that gloo's threads still hold"
    if found.get("guessed"):
        yield "values that the step asks for are not known: masks are taken to select all, numbers to be one"
    if measured := result.get("measured"):
        peak, held = (bytes_told(measured[key]) for key in ("peak_bytes", "held_bytes"))
        yield (
            f"measured peak {peak} over {many(measured['steps'], 'step')} ({held} held by the process); "
            f"the prediction is off by {result['error']:+.1%}"
        )


def _arithmetic(result: Result) -> Iterator[Any]:
    training, gpu = result["training"], significant(result["gpu_memory_gb"])
    yield f"memory: {_count(result['num_params'])} parameters, {result['optimizer']}, {result['precision']}"
    yield f"  weights alone: {', '.join(f'{_gb(v)} at {name}' for name, v in result['weights_gb'].items())}"
    parts = ", ".join(f"{name} {_gb(training[f'{name}_gb'])}" for name in ("weights", "gradients", "states"))
    yield f"  to train: {_gb(training['total_gb'])} ({parts}, about {_gb(training['activations_gb'])} of activations)"
    yield f"  GPUs of {gpu} GB that FSDP then needs: {training['num_gpus']:,}"
    yield ""
    yield _grid(result["table"])
    yield ""
    yield table(
        ("parameters", *WIDTHS, "to train", "GPUs"),
        [
            (_count(size["num_params"]), *(_gb(size["weights_gb"][w]) for w in WIDTHS), _gb(size["total_gb"]),
             f"{size['num_gpus']:,}")
            for size in result["sizes"]
        ],
    )  # fmt: skip


def _grid(cells: Sequence[Result]) -> Table:
    """Optimizers down, precisions across."""
    precisions = list(dict.fromkeys(cell["precision"] for cell in cells))
    grid: dict[str, list[str]] = {}
    for cell in cells:
        text = f"{significant(cell['total_gb'])} ({cell['num_gpus']:,})"
        grid.setdefault(cell["optimizer"], []).append(text)
    return table(("GB to train (GPUs)", *precisions), [(name, *row) for name, row in grid.items()])


def _gb(value: float) -> str:
    return f"{significant(value)} GB"


def _count(value: float) -> str:
    """A number of parameters.

    >>> _count(7e9), _count(350e6), _count(12)
    ('7B', '350M', '12')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:g}"


def numerics_lines(result: Result) -> Iterator[Any]:
    """Every format in figures, then each number in every format."""
    heads = ("format", "sign", "exponent", "fraction", "bytes", "range", "smallest > 0")
    yield table(heads, [_format(entry) for entry in result["formats"]])
    for value in result["values"]:
        yield ""
        rows = [
            (e["name"], _exact(e["stored"]), _short(e["error"]), _short(e["relative_error"])) for e in value["stored"]
        ]
        yield table((value["text"], "stored", "error", "relative error"), rows)


def _format(entry: Result) -> tuple[str, ...]:
    bits = (str(entry[f"{part}_bits"]) for part in ("sign", "exponent", "fraction"))
    scaled = f" ×{entry['scale']:g}" if entry["scale"] is not None else ""
    low, high, smallest = (f"{entry[key]:.5g}" for key in ("lowest", "largest", "smallest_positive"))
    reach = f"±{high}" if low == f"-{high}" else f"{low} to {high}"
    return (entry["name"] + scaled, *bits, f"{entry['bytes']:g}", reach.replace("-", "−"), smallest)


def _exact(value: float) -> str:
    """All digits: what is stored is exact."""
    return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞") if math.isinf(value) else f"{value:.17g}"


def _short(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"
