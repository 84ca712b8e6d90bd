"""What a stage's result was made from, and whether that is still what lies beside it.

A result records the sha256 of what it read. A run directory whose quantization was made anew holds an export of one
that is gone: each file is whole, and the two do not belong together.

Left out on purpose: results in other folders, and inputs that were never a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHA256 = 64  # hexadecimal digits


def superseded(results: Mapping[str, Mapping[str, Any]], stage: str) -> str:
    """What ``stage`` was made from and is another now, of the results in one run directory by stage; else empty.

    What is not recorded, or lies elsewhere, is not compared.
    """
    before, pairs = {
        "quantize": ("train", {"weights": "model"}),
        "export": ("quantize", {"quantized": "int8"}),
        "benchmark": ("export", {name: name for name in ("fp32", "fp16", "int8")}),
    }.get(stage, ("", {}))
    if stage == "quantize" and results.get(stage, {}).get("source", {}).get("trained_in") != ".":
        return ""
    given, made = results.get(stage, {}).get("inputs", {}), results.get(before, {}).get("outputs", {})
    if results.get(stage, {}).get("config", {}).get("provider", "").startswith("torch"):
        return ""  # measured from the graphs of the quantization
    changed = any(
        len(given.get(name, "")) == SHA256 and name_there in made and made[name_there]["sha256"] != given[name]
        for name, name_there in pairs.items()
    )
    return f"of an earlier {before}" if changed else ""


def outdated(results: Mapping[str, Mapping[str, Any]], run: Path) -> list[str]:
    """A sentence for each stage of ``run`` whose result is of another than lies there now, with what to do."""
    told = {stage: superseded(results, stage) for stage in results}
    return [f"{stage} is {why}: run 'qtool {stage} {run}' again" for stage, why in told.items() if why]
