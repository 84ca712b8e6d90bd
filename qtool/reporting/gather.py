"""What a run directory has to tell: each stage's result, each variant's, and what is not there yet.

A report on an unfinished run shows what there is. A result that is missing, damaged or stale becomes a
sentence, not a failure; only a folder without any that can be read is refused. What a contract that was not kept leaves
(``contract.json``) is a result too: why there is nothing else.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool.artifacts import STAGES, has_result, read_result
from qtool.errors import QtoolError, unreadable
from qtool.lineage import outdated, superseded
from qtool.source import require_run_directory
from qtool.system.json_files import from_json

PLAIN = ("config", "metrics", "contract", "memory", "stale")
"""What of a result goes into the plain report."""
VARIANT_STAGES = ("quantize", "export", "benchmark")
REFUSED = "contract.json"


@dataclass
class Run:
    """One folder's results by stage, its variants, and what is missing, unread or stale in it."""

    name: str
    path: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unread: list[QtoolError] = field(default_factory=list)
    refused: dict[str, Any] | None = None

    def get(self, stage: str) -> dict[str, Any]:
        """A stage's result, empty where there is none."""
        return self.results.get(stage, {})

    @property
    def told(self) -> list[str]:
        """What is missing or stale, here and in the variants, each sentence with the variant's name."""
        return [*self.missing, *(f"{place.name}: {text}" for place in self.variants for text in place.missing)]

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
    def contract(self) -> Mapping[str, Any] | None:
        """The outcome of the last contract: one that was not kept, or that of the quantization that is there."""
        return self.refused or self.get("quantize").get("contract")

    @property
    def contracted(self) -> list[Run]:
        """This folder or its variants, whichever were held to a contract."""
        return [run for run in (self, *self.variants) if run.contract]

    @property
    def quantized(self) -> list[Run]:
        """This folder or its variants, whichever were quantized or exported."""
        return [run for run in (self, *self.variants) if "quantize" in run.results or "export" in run.results]


def gather(path: Path) -> Run:
    """Reads a run directory, or the folder of one variant. Raises QtoolError where there is no result at all."""
    if not path.is_dir():
        require_run_directory(path, STAGES[0])
    run = _read(path, path.resolve().name)
    names = [f"{stage}.json" for stage in STAGES]
    folders = sorted({file.parent for name in (*names, REFUSED) for file in path.glob(f"[!.]*/{name}")})
    run.variants = [_read(folder, folder.name, path) for folder in folders if folder.name != "checkpoints"]
    places = (run, *run.variants)
    if not any(place.results or place.refused for place in places):
        if unread := [error for place in places for error in place.unread]:
            raise unread[0]
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


def plain(run: Run) -> dict[str, Any]:
    """The report as plain values: each stage's configuration and figures, those of the variants, what is missing."""
    found: dict[str, Any] = {"run": os.fspath(run.path)}
    for stage in (stage for stage in STAGES if (run.path / f"{stage}.json").exists() and stage in run.results):
        result = run.results[stage]
        found[stage] = {key: result[key] for key in PLAIN if key in result}
        found |= {"environment": result["environment"]} if "environment" in result else {}
    found |= {"refused": run.refused} if run.refused else {}
    found |= {"missing": run.missing} if run.missing else {}
    return found | ({"variants": {place.name: plain(place) for place in run.variants}} if run.variants else {})


def _read(path: Path, name: str, whole: Path | None = None) -> Run:
    run = Run(name, path)
    for stage in STAGES:
        if not has_result(path, stage):
            continue
        try:
            result = read_result(path, stage, verify=False, stale=True)
        except QtoolError as error:
            run.unread.append(error)
            continue
        run.results[stage] = result
        if result.get("stale"):
            run.missing.append(f"{stage} is stale: {result['stale']}")
    run.missing += outdated(run.results, path, whole)
    try:
        run.refused = refused(path)
    except QtoolError as error:
        run.unread.append(error)
    run.missing[:0] = map(str, run.unread)
    return run


def refused(run: Path) -> dict[str, Any] | None:
    """The outcome of a contract that was not kept; None where there is none. Raises QtoolError for a damaged one."""
    if not (path := run / REFUSED).exists():
        return None
    try:
        outcome = from_json(path.read_text(encoding="utf-8"))
        if not {"met", "chosen", "method", "criteria", "num_samples", "trials", "frontier", "harmful"} <= set(outcome):
            raise ValueError("no outcome of a contract")
    except OSError as error:
        raise unreadable(f"'{path}'", "a contract's outcome", error) from error
    except (ValueError, TypeError) as error:
        raise QtoolError(f"'{path}'", "a contract's outcome", str(error), "run 'qtool quantize' again") from error
    return dict(outcome)


def _add_training(run: Run) -> None:
    """Takes the training of a variant's folder from the folder that its weights came from."""
    if "train" in run.results:
        return
    for result in run.results.values():
        came_from = (result.get("source") or {}).get("trained_in")
        if came_from and has_result(run.path / came_from, "train"):
            if trained := _read(run.path / came_from, "").get("train"):
                run.results["train"] = trained
            return


def _note_missing(run: Run) -> None:
    if run.refused:
        run.missing.append("no quantized model: the contract was not kept")
        return
    done = [stage for stage in VARIANT_STAGES if stage in run.results]
    if done == ["benchmark"]:
        return  # files that were measured as they came
    if run.results.get("quantize", {}).get("config", {}).get("activation_bits", 8) < 8:
        run.missing.append("no file: activations of fewer than 8 bits are a simulation")
        return
    later = [stage for stage in VARIANT_STAGES if stage not in run.results]
    if "export" in run.results and not (run.path / "quantize.json").exists():
        later.remove("quantize")  # exported from another folder
        run.missing += [f"contract {gate['found']}" for gate in _gates(run) if _is_open(gate)]
    if later:
        told = any(superseded(run.results, stage) for stage in done)  # with what is to be run again
        step = "" if told else f" (next: qtool {later[0]} {shlex.quote(str(run.path))})"
        run.missing.append(f"not there yet: {', '.join(later)}{step}")


def _gates(run: Run) -> list[Mapping[str, Any]]:
    return list(run.get("export").get("metrics", {}).get("gates", ()))


def _is_open(gate: Mapping[str, Any]) -> bool:
    """Whether nothing says that the file keeps a contract which it was made under."""
    return gate["name"] == "contract" and gate["passed"] is None
