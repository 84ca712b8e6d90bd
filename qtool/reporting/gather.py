"""What a run directory has to tell: each stage's result, each variant's, and what is not there yet.

A report on an unfinished run shows what there is. A result that is missing, damaged or stale becomes a
sentence, not a failure; only a folder without any result is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool.artifacts import STAGES, has_result, read_result
from qtool.errors import QtoolError

VARIANT_STAGES = ("quantize", "export", "benchmark")


@dataclass
class Run:
    """One folder's results by stage, its variants, and what is missing or stale in it."""

    name: str
    path: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def get(self, stage: str) -> dict[str, Any]:
        """A stage's result, empty where there is none."""
        return self.results.get(stage, {})

    @property
    def benchmark(self) -> Mapping[str, Any] | None:
        """The figures of the benchmark, or None."""
        figures = self.get("benchmark").get("metrics")
        return figures if figures and figures.get("variants") else None

    @property
    def measured(self) -> list[Run]:
        """This folder or its variants, whichever were benchmarked."""
        return [run for run in (self, *self.variants) if run.benchmark]

    @property
    def quantized(self) -> list[Run]:
        """This folder or its variants, whichever were quantized or exported."""
        return [run for run in (self, *self.variants) if "quantize" in run.results or "export" in run.results]


def gather(path: Path) -> Run:
    """Reads a run directory, or the folder of one variant. Raises QtoolError where there is no result at all."""
    if not path.is_dir():
        got = "a file" if path.is_file() else "no such folder"
        raise QtoolError(f"'{path}'", "a run directory", got, "give the folder that qtool wrote its results to")
    run = _read(path, path.resolve().name)
    folders = sorted({file.parent for stage in STAGES for file in path.glob(f"*/{stage}.json")})
    run.variants = [_read(folder, folder.name) for folder in folders if folder.name != "checkpoints"]
    if not run.results and not any(variant.results for variant in run.variants):
        raise QtoolError(
            f"run directory '{path}'",
            f"a result of {', '.join(STAGES)}",
            "none",
            "run a stage with this directory first",
        )
    _add_training(run)
    for place in run.variants or [run]:
        _note_missing(place)
    return run


def _read(path: Path, name: str) -> Run:
    run = Run(name, path)
    for stage in STAGES:
        if not (path / f"{stage}.json").exists() or not has_result(path, stage):
            continue
        try:
            result = read_result(path, stage, verify=False, stale=True)
        except QtoolError as error:
            run.missing.append(str(error))
            continue
        run.results[stage] = result
        if result.get("stale"):
            run.missing.append(f"{stage} is stale: {result['stale']}")
    return run


def _add_training(run: Run) -> None:
    """Takes the training of a variant's folder from the folder that its weights came from."""
    if "train" in run.results:
        return
    for result in run.results.values():
        came_from = (result.get("source") or {}).get("trained_in")
        if came_from and has_result(run.path / came_from, "train"):
            run.results["train"] = _read(run.path / came_from, "").get("train")
            return


def _note_missing(run: Run) -> None:
    done = [stage for stage in VARIANT_STAGES if stage in run.results]
    if done == ["benchmark"]:
        return  # files that were measured as they came
    later = [stage for stage in VARIANT_STAGES if stage not in run.results]
    if later:
        run.missing.append(f"not there yet: {', '.join(later)} (next: qtool {later[0]} {run.path})")
