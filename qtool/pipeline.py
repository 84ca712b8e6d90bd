"""A recipe's stages in order, resumed from what is already on disk.

A finished stage is skipped while its configuration, its inputs (by hash) and its outputs (by hash) are
what its result records. One that was stopped resumes where it can (training and QAT, from the last
checkpoint) and is done again where it cannot. Either way the files are those of an undisturbed run.

The run directory holds the trained model; each quantized variant has a folder in it::

    runs/x/recipe.toml  model.safetensors  train.json  report.json
    runs/x/ptq/         float.pt2  int8.pt2  ranges.json  quantize.json
                        model.fp32.onnx  model.fp16.onnx  model.int8.onnx  export.json  benchmark.json  report.json
    runs/x/qat/         the same

A gate that fails in one variant does not stop the others; it decides the exit code at the end.

Left out on purpose: running variants at the same time. They would disturb each other's measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import STAGES, has_result, whole
from qtool.errors import ContractError, UsageError, kind_of
from qtool.recipe import QatConfig, QuantizeConfig, Recipe
from qtool.recipe_files import find_recipe, from_anywhere, from_table, load_recipe, to_toml
from qtool.source import require_run_directory
from qtool.stages import benchmark, export, quantize, sensitivity, train
from qtool.stages.benchmarking import measured, require_use
from qtool.stages.common import Progress, folder_of, run_of, teller, writable
from qtool.stages.quantize_options import may_train, quantize_configs, require_options
from qtool.stages.rehearsal import rehearse
from qtool.system.files import atomic_path, path_of
from qtool.system.json_files import write_json

if TYPE_CHECKING:
    from qtool.exporting.stage import ExportResult

__all__ = ["benchmark", "export", "inspect", "quantize", "report", "run", "sensitivity", "train"]


def run(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = True,
    trust: bool = False,
    progress: Progress = False,
) -> dict[str, Any]:
    """Does all stages of a recipe and returns the report, which is also in ``out/report.json``.

    ``recipe`` is a TOML file, the name of a recipe in the package, a mapping like such a file or a Recipe;
    ``overrides``, of which a Recipe takes none, are ``"train.epochs=8"`` and the like. ``out`` is ``runs/NAME`` by
    default. Raises QtoolError for what a later stage would refuse or miss before the first begins, and ContractError
    after all variants are done where a gate of one was not met.
    """
    wanted, folder = _opened(recipe, out, overrides)
    writable(folder)
    tell = teller(progress)
    for mode in wanted.variants or ():
        require_options(*quantize_configs(*_told(wanted, mode), {}))
    if wanted.variants and not has_result(folder, "train"):
        _require_later(wanted)
        rehearse(wanted, tell)
    train(
        wanted.model, wanted.data, out=folder, task=wanted.task, weights=wanted.weights, config=wanted.train,
        resume=resume, progress=progress,
    )  # fmt: skip
    with atomic_path(folder / "recipe.toml") as temporary:
        temporary.write_text(to_toml(from_anywhere(wanted)), encoding="utf-8")
    failures: list[ContractError] = []
    for mode in wanted.variants or ():
        try:
            _variant(wanted, mode, folder, resume, trust, progress)
        except ContractError as error:
            tell(f"{mode}: {error}")
            failures.append(error)
    summary = report(folder)
    write_json(folder / "report.json", summary)
    if failures:
        raise failures[0]
    return summary


def _opened(
    recipe: str | Path | Recipe | Mapping[str, Any], out: str | Path | None, overrides: Sequence[str]
) -> tuple[Recipe, Path]:
    """The recipe, and the run directory."""
    if out is not None:
        out = folder_of(out)
    if isinstance(recipe, str | Path):
        path = find_recipe(str(recipe))
        return load_recipe(path, overrides), out or folder_of(Path("runs") / path.stem)
    if not isinstance(recipe, Recipe | Mapping):
        expected, do = "a TOML file, the name of a recipe, a mapping or a Recipe", "pass one of these"
        raise UsageError("argument 'recipe'", expected, kind_of(recipe), do)
    if out is None:
        raise UsageError("argument 'out'", "a run directory for a recipe that has no file", "none", "pass out=…")
    if not isinstance(recipe, Recipe):
        return from_table(recipe, overrides), out
    if overrides:
        do = "change its fields with dataclasses.replace, or pass a mapping"
        raise UsageError("argument 'overrides'", "none beside a Recipe", ", ".join(overrides), do)
    return recipe, out


def _require_later(recipe: Recipe) -> None:
    """Raises QtoolError for what later stages would refuse, or miss on this machine: told before a training."""
    from qtool.benchmarking.regression import read_benchmark
    from qtool.benchmarking.stage import require_no_shapes
    from qtool.runtimes import require
    from qtool.system.devices import resolve_device

    resolve_device(recipe.quantize.device)
    require_use(recipe.benchmark)
    require_no_shapes(recipe.benchmark)
    require(recipe.benchmark.provider, recipe.benchmark.device)
    if recipe.benchmark.compare:
        read_benchmark(Path(recipe.benchmark.compare))


def _told(recipe: Recipe, mode: str) -> tuple[QuantizeConfig, QatConfig | None]:
    """What quantize is told for a variant."""
    config = dataclasses.replace(recipe.quantize, mode=mode)
    return config, recipe.qat if may_train(config) else None


def _variant(recipe: Recipe, mode: str, folder: Path, resume: bool, trust: bool, progress: Progress) -> None:
    """Quantize, export and benchmark, in the variant's own folder."""
    place = folder / mode
    teller(progress)(f"{mode}: in {place}")
    config, qat = _told(recipe, mode)
    quantize(folder, out=place, config=config, qat=qat, trust=trust, resume=resume, progress=progress)
    export(place, config=recipe.export, trust=trust, resume=resume, progress=progress)
    if not (resume and measured(place, recipe.benchmark, teller(progress))):
        benchmark(place, config=recipe.benchmark, trust=trust, progress=progress)
    write_json(place / "report.json", report(place))


def report(folder: str | Path | ExportResult, out: str | Path | None = None) -> dict[str, Any]:
    """What is known of a run directory, from its results: each stage's metrics, and each variant's the same way.

    What :func:`export` returned stands for its run directory. With ``out`` the report is also written there, as
    ``report.html``, ``report.md`` and ``report.json``. Raises QtoolError where there is no result.
    """
    from qtool.reporting.gather import gather, plain
    from qtool.reporting.page import write_report

    path = _path_of(folder, "folder", "a run directory")
    with whole(path):
        found = gather(path)
        if out is not None:
            write_report(found, folder_of(out))
        return plain(found)


def inspect(artifact: str | Path | ExportResult) -> dict[str, Any]:
    """What is inside a run directory, an ONNX file, a ``.pt2``, a ``.safetensors`` or a result, as plain values."""
    from qtool.inspection import describe, describe_run, is_refused, variant_folders

    path = _path_of(artifact, "artifact", "a file or a run directory")
    with whole(path):
        if not path.is_dir():
            return describe(path)
        if not variant_folders(path) and not is_refused(path):
            stage = next((s for s in STAGES if has_result(path, s)), None)
            if stage is None:
                do = "name the folder that a stage wrote, or a file"
                raise UsageError(f"artifact '{path}'", "a file or a run directory", "a folder without results", do)
            require_run_directory(path, stage)
        return describe_run(path)


def _path_of(what: object, name: str, kind: str) -> Path:
    """The path that was given, or the run directory of what export returned. Raises UsageError for anything else."""
    do = "pass its out=…; what is integer in a quantized model, its .plan tells"
    return path_of(run_of(what), f"argument '{name}'", f"the path of {kind}", do)
