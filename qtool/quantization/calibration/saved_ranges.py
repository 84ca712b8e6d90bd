"""What a ``ranges.json`` holds, and whether another quantization can repeat it.

For each quantized tensor the ends of its range (``low``, ``high``), how they were chosen (``method``) and what was seen
of it (``observed``), and under the name of its unit what algorithms changed there. The ends may be edited; whatever is
in the file is looked at before a model is touched, and by who takes it where that asks for the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, UsageError, require_file
from qtool.quantization.algorithms import CHANGES
from qtool.recipe import QuantizeConfig

CHANGED = (*CHANGES, "left")
FORMS: dict[str, Any] = {
    "low": float, "high": float, "method": str, "observed": dict, "weight": int, "rounding": str, "scale": float,
    "equalize": {"scales": list, "shifts": list}, "left": bool,
}  # fmt: skip
"""The form of what entries may have: a type, or a dict with all of these. Numbers of channels are looked at by what
takes them (``subject.saved_numbers``)."""


def read_ranges(path: Path) -> Mapping[str, Any]:
    """Reads a ``ranges.json``. Raises UsageError where there is none, QtoolError where it is another file."""
    require_file(path, "the ranges.json of a quantize run")
    try:
        ranges = json.loads(path.read_text(encoding="utf-8"))
        for name, entry in ranges.items():
            _check_entry(name, entry)
    except (OSError, ValueError, AttributeError) as error:
        raise QtoolError(f"'{path}'", "the ranges.json of a quantize run", str(error), "check the path") from error
    return dict(ranges)


def check_repeated(saved: Mapping[str, Any], config: QuantizeConfig) -> None:
    """Raises UsageError for ranges behind changes of the graph that will not be repeated, and of another method.

    Min-max is let by, since it is also what leaves the algorithms out.
    """
    read_by = {str(entry["method"]) for entry in saved.values() if "method" in entry} - {"fixed"}
    if read_by and config.ranges not in ("minmax", QuantizeConfig().ranges, *read_by):
        raise UsageError(
            "--ranges", f"{' or '.join(sorted(read_by))}, as the ranges of --ranges-from were chosen", config.ranges,
            "leave it out, or calibrate anew",
        )  # fmt: skip
    names = config.algorithms or ("none",)
    for kind in CHANGES:
        repeats = kind in names and config.engine == "pt2e" and config.mode == "ptq"
        if not repeats and any(kind in entry for entry in saved.values()):
            raise UsageError(
                "--ranges-from",
                f"{kind} among --algorithms, --engine pt2e, and --freeze-bn 0 with --mode qat, as when they were saved",
                f"{', '.join(names)}, {config.engine} and {config.mode}", "repeat these settings or calibrate anew",
            )  # fmt: skip


def changes_in(ranges: Mapping[str, Any]) -> dict[str, Any]:
    """What passes over the float graph did, by its place: all but the ends of ranges and how they were found."""
    seen = {name: {key: entry[key] for key in CHANGED if key in entry} for name, entry in ranges.items()}
    return {name: entry for name, entry in seen.items() if entry}


def _check_entry(name: str, entry: Any) -> None:
    """Raises ValueError, in words, for an entry that has neither a range nor what an algorithm changed."""
    if not isinstance(entry, Mapping) or not (
        {"low", "high"} <= entry.keys() or {"bias", "learned", *CHANGES} & {*entry}
    ):
        raise ValueError(f"an entry '{name}' without low and high")
    for key, value in (*entry.items(), *(entry.get("learned") or {}).items()):
        if key in FORMS and not _has_form(value, FORMS[key]):
            raise ValueError(f"'{key}' of '{name}' that is not {_in_words(FORMS[key])}")
    if ("low" in entry) != ("high" in entry) or entry.get("low", 0.0) > entry.get("high", 0.0):
        raise ValueError(f"an entry '{name}' without a low that is at most its high")


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, dict):
        return isinstance(value, Mapping) and all(key in value and _has_form(value[key], form[key]) for key in form)
    if form is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is form


def _in_words(form: Any) -> str:
    if isinstance(form, dict):
        return " and ".join(form)
    return {float: "a finite number", int: "an integer", str: "text", bool: "true or false"}.get(form, "a table")
