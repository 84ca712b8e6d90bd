"""The ladder as a table and as a picture: what each technique, on top of those before it, did to memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtool.reporting.axes import RIGHT, WIDTH, Scale, fitting, svg
from qtool.reporting.markup import Markup, el
from qtool.reporting.memory import table
from qtool.reporting.numbers import UNKNOWN, significant

Result = Mapping[str, Any]
MB = 1e6
_STYLE = Markup(
    "text{font:12px sans-serif;fill:#222}.predicted{fill:#9bb8d8}.measured{fill:#2b6cb0}"
    ".published{stroke:#c05621;stroke-width:2}"
)
_ROW, _NAME, _LETTER = 44.0, 14.0, 6.5


def ladder_lines(result: Result) -> Iterator[Any]:
    """The source, then a row for each rung; rungs that failed say why below."""
    rungs = result["rungs"]
    yield f"ladder: {result['source']['model']} on {result['source']['data']}, each rung on top of the one above it"
    heads = [
        "rung",
        "predicted\nMB",
        "measured\nMB",
        "off by",
        "ms\n/step",
        "samples\n/s",
        "loss",
        *_metric_names(rungs),
    ]
    yield table(heads, [_row(rung, heads[7:]) for rung in rungs])
    if published := sorted({key for rung in rungs for key in rung["published"]}):
        yield ""
        yield table(["published", *published], [_published_row(rung, published) for rung in rungs])
    if (count := max((len(rung.get("seeds", ())) for rung in rungs), default=1)) > 1:
        yield f"losses and metrics are means over {count} seeds"
    yield from (f"  {rung['name']}: {rung['failed']}" for rung in rungs if "failed" in rung)


def _metric_names(rungs: Sequence[Result]) -> list[str]:
    names = {name for rung in rungs for name in rung.get("metrics", {})}
    return sorted(names - {"num_samples", "loss"})


def _published_row(rung: Result, names: Sequence[str]) -> tuple[str, ...]:
    return (rung["name"], *(_scaled(rung["published"].get(name)) for name in names))


def _row(rung: Result, metrics: Sequence[str]) -> tuple[str, ...]:
    known = {
        "predicted": _scaled(rung.get("predicted_bytes"), 1 / MB), "measured": _scaled(rung.get("peak_bytes"), 1 / MB),
        "error": f"{rung['error']:+.1%}" if "error" in rung else UNKNOWN,
        "time": _scaled(rung.get("seconds_per_step"), 1e3), "speed": _scaled(rung.get("samples_per_s")),
        "loss": _scaled(rung.get("loss")),
    }  # fmt: skip
    found = (_scaled(rung.get("metrics", {}).get(name)) for name in metrics)
    return (rung["name"], *known.values(), *found)


def _scaled(value: float | None, by: float = 1.0) -> str:
    return UNKNOWN if value is None else significant(value * by)


def picture(rungs: Sequence[Result]) -> Markup:
    """Two bars a rung, predicted and measured peak, and a line where a published peak is known (in GB of 1e9 bytes)."""
    sizes = [size for rung in rungs for size in (rung.get("predicted_bytes"), rung.get("peak_bytes"), _published(rung))]
    x = Scale(0.0, max((s for s in sizes if s), default=1.0), _NAME, WIDTH - RIGHT - 60)
    parts = [part for i, rung in enumerate(rungs) for part in _bars(rung, 8 + i * _ROW, x)]
    height = 8 + len(rungs) * _ROW + 22
    key = "light: predicted; dark: measured; line: published. MB of 10⁶ bytes."
    return svg(height, "Peak memory, rung by rung", el("style", _STYLE), *parts, el("text", key, x=_NAME, y=height - 8))


def _published(rung: Result) -> float | None:
    return rung["published"]["peak_gb"] * 1e9 if "peak_gb" in rung["published"] else None


def _bars(rung: Result, top: float, x: Scale) -> Iterator[Markup]:
    yield el("text", fitting(rung["name"], WIDTH - _NAME, _LETTER), x=_NAME, y=top + 11)
    for row, (key, cls) in enumerate((("predicted_bytes", "predicted"), ("peak_bytes", "measured"))):
        size = rung.get(key)
        if size is not None:
            y = top + 15 + row * 12
            yield el("rect", x=x.start, y=y, width=x(size) - x.start, height=11.0, cls=cls)
            yield el("text", _scaled(size, 1 / MB), x=x(size) + 4, y=y + 10)
    if (place := _published(rung)) is not None:
        yield el("line", x1=x(place), x2=x(place), y1=top + 13, y2=top + 40, cls="published")
