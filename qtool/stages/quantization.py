"""The quantization stage: a float model and calibration data, to the quantized form.

QAT needs training, and stages do not import each other, so the loop with the training techniques is
handed to the quantizer as a function of the prepared graph: see ``fine_tuning``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import read_result, staging, whole, write_result
from qtool.errors import ContractError, QtoolError
from qtool.lineage import content_of
from qtool.options import argument, documented
from qtool.recipe import QatConfig, QuantizeConfig, as_dict
from qtool.source import UNIDENTIFIED, Source, open_float, require_run_directory
from qtool.stages.common import (
    AnyPath,
    Progress,
    anywhere,
    calibration_of,
    checkpointing,
    drop_checkpoints,
    example_of,
    finished,
    in_turn,
    meter,
    run_of,
    seen_from,
    teller,
    tidy,
    writable,
)
from qtool.stages.contract import Make, forget, fulfil
from qtool.stages.fine_tuning import fine_tuning, rounded_by
from qtool.stages.quantize_options import quantize_configs, require_options, unused
from qtool.stages.sensitivity import measured_before
from qtool.system.files import path_of, sha256_of
from qtool.system.json_files import write_json
from qtool.units import many

if TYPE_CHECKING:
    from torch import nn

    from qtool.exporting.stage import ExportResult
    from qtool.form import QuantizedModel
    from qtool.models.given import HasModel
    from qtool.quantization.capturing.float_form import FloatForms
    from qtool.tasks import Task


@in_turn
@documented(QuantizeConfig, QatConfig)
def quantize(
    model: nn.Module | HasModel | AnyPath,
    data: object = None,
    *,
    out: AnyPath | None = None,
    task: Task | str = "classification",
    weights: AnyPath | None = None,
    trust: bool = False,
    resume: bool = True,
    config: QuantizeConfig | None = None,
    qat: QatConfig | None = None,
    validation: Iterable[Any] | None = None,
    progress: Progress = False,
    **options: Any,
) -> QuantizedModel:
    """Quantizes a model to INT8 and returns the quantized form; with ``out`` it also commits it there.

    ``model`` is a module (or what :func:`train` returned), a spec, or the run directory of a training or an earlier
    quantization. ``data`` gives the calibration samples (and for ``mode="qat"`` the training data): a spec, a Data, a
    mapping, or any iterable of batches: (input, target), inputs alone, or dicts of arguments that may hold the target
    as ``labels``. An input of several arguments is a tuple of them, or a dict by name. ``options`` are the fields of
    QuantizeConfig and, for QAT, of QatConfig, which are those of :func:`train` too; ``seed`` and a ``device`` that is
    named are for both. ``out`` is a run directory to leave it in, for :func:`export` and :func:`load_quantized`. The
    model itself is left as it was.

    With ``max_drop``, ``max_kl`` or ``min_agreement`` the cheapest quantization is searched that keeps to it on the
    validation part, or on ``validation``: batches of (input, target) or of inputs alone. Raises ContractError, its
    ``details`` the outcome, where none does.
    """
    config, tuning = quantize_configs(config, qat, options)
    require_options(config, tuning)
    config = anywhere(config)
    if validation is not None and not config.has_contract:
        raise unused("validation")
    source, folder = _quantize_source(model, data, task, weights, writable(out), tuning, trust)
    settings = _settings(config, tuning)
    inputs, drawn = calibration_of(config, source)
    known = (
        source.inputs | _calibrated_by(config, drawn) | ({"validation": UNIDENTIFIED} if validation is not None else {})
    )

    tell = teller(progress)

    def is_done(tell: Callable[[str], None]) -> bool:
        return bool(folder and resume and finished(folder, "quantize", settings, known, tell))

    if folder and is_done(tell):
        return load_quantized(folder)
    folder = writable(folder)
    tell(f"quantize: {config.mode}, calibrated on {_describe(drawn)}")
    forms = _forms(source)
    make = _maker(source, tuning, inputs, folder, resume, progress, known, forms)
    keeps = folder if tuning or config.has_contract else None  # a training's steps, a search's candidates
    with checkpointing(keeps, "quantize"), tidy(folder):
        if folder and keeps and is_done(lambda text: None):  # by another process, meanwhile
            tell(f"quantize: as it is in '{folder}', which another process has just finished")
            return load_quantized(folder)
        if config.has_contract:
            if folder and not resume:
                forget(folder)

            def keep(place: Path, tried: QuantizeConfig, model: QuantizedModel, outcome: dict[str, Any]) -> None:
                more = _contracted(outcome)
                _commit_quantize(place, _settings(tried, tuning), known, source.record, model, drawn, more)

            try:
                found = fulfil(
                    source, config, inputs, validation, make, keep, folder=folder, tell=tell, tuning=tuning, forms=forms
                )
            except ContractError:  # each candidate is whole: no pass is to go on
                if scratch := _scratch(folder):
                    shutil.rmtree(scratch, ignore_errors=True)
                raise
            quantized, more = found[0], _contracted(found[1])
        else:
            quantized, more = make(config, folder), measured_before(folder, source, config, inputs)
        if folder:
            _commit_quantize(folder, settings, known, source.record, quantized, drawn, more)
    return quantized


def _settings(config: QuantizeConfig, tuning: QatConfig | None) -> dict[str, Any]:
    return as_dict(config) | ({"qat": as_dict(tuning)} if tuning else {})


def _contracted(outcome: dict[str, Any]) -> dict[str, Any]:
    """What a quantization under a contract records beside itself."""
    return {"contract": outcome, "sensitivity": outcome["harmful"]}


def _maker(
    source: Source, tuning: QatConfig | None, inputs: Iterable[Any], folder: Path | None, resume: bool,
    progress: Progress, known: Mapping[str, str], forms: FloatForms,
) -> Make:  # fmt: skip
    """What quantizes the source's model as it is told; what a run that was killed goes on from is in ``folder``.

    ``known`` names what is read.
    """
    scratch = _scratch(folder)
    if scratch and not resume:
        shutil.rmtree(scratch, ignore_errors=True)

    def make(config: QuantizeConfig, place: Path | None) -> QuantizedModel:
        from qtool.quantization import stage

        assert source.model is not None
        trains = tuning is not None and config.mode == "qat"
        training: dict[str, Any] = {}
        with meter(False if trains else progress, "quantize") as report:
            made = stage.quantize(
                source.model, config, example=example_of(source, inputs), calibration=inputs, tuning=tuning,
                qat=fine_tuning(source, tuning, place, resume, progress, {**known, **rounded_by(config)}, training)
                if trains and tuning else None,
                report=report, scratch=scratch, forms=forms,
            )  # fmt: skip
        return dataclasses.replace(made, training=training)

    return make


def _forms(source: Source) -> FloatForms:
    from qtool.quantization.capturing.float_form import FloatForms

    assert source.model is not None
    return FloatForms(source.model)


def _scratch(folder: Path | None) -> Path | None:
    """Where passes keep what they have finished."""
    return folder / "checkpoints" / "algorithms" if folder else None


def _quantize_source(
    model: nn.Module | HasModel | AnyPath, data: object, task: Task | str, weights: AnyPath | None, out: Path | None,
    tuning: QatConfig | None, trust: bool,
) -> tuple[Source, Path | None]:  # fmt: skip
    """The source to quantize and where the result goes; a run directory gives both."""
    smoothing = tuning.label_smoothing if tuning else 0.0
    source, run = open_float(model, data, task, weights, trust=trust, label_smoothing=smoothing)
    if tuning and isinstance(source.data, Iterator):  # which calibration and each epoch go through
        source = dataclasses.replace(source, data=list(source.data))
    return source, out or run


def _calibrated_by(config: QuantizeConfig, drawn: Mapping[str, Any]) -> dict[str, str]:
    """What names the samples that were drawn, which passes may read, and the ranges that are repeated."""
    saved = config.ranges_from is not None and Path(config.ranges_from).is_file()
    ranges = {"ranges": sha256_of(Path(str(config.ranges_from)))} if saved else {}
    named = drawn["spec"] is not None
    return ranges | {"calibration": f"{drawn['data']} {drawn['indices_sha256']}" if named else UNIDENTIFIED}


def _describe(drawn: Mapping[str, Any]) -> str:
    if drawn["spec"] is None:
        return "the batches given"
    short = f" (of {drawn['num_asked']} asked for)" if drawn["num_samples"] < drawn["num_asked"] else ""
    return f"{many(drawn['num_samples'], 'sample')}{short}"


def _commit_quantize(
    run: Path,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    record: Mapping[str, Any],
    quantized: QuantizedModel,
    drawn: Mapping[str, Any],
    more: Mapping[str, Any],
) -> None:
    with staging(run, "quantize") as folder:
        files = quantized.save(folder)
        write_json(folder / "ranges.json", quantized.ranges)
        plan = quantized.plan
        counts = {"num_integer_units": len(plan.integer_units), "num_float_units": len(plan.float_units)}
        extra = {"source": seen_from(run, record), "calibration": dict(drawn), "plan": plan.as_dict(), **more}
        extra |= quantized.training
        extra["content"] = content_of(quantized.graph)
        write_result(
            run, "quantize", config=settings, inputs=inputs, metrics=counts, extra=extra,
            outputs=files | {"ranges": folder / "ranges.json"},
        )  # fmt: skip
    drop_checkpoints(run)
    forget(run)


def load_quantized(run: AnyPath | ExportResult) -> QuantizedModel:
    """Opens the quantized model that :func:`quantize` left in the run directory ``run``: its ``out``.

    It is called like the float model, and simulates the integers in float32. What :func:`export` returned stands for
    its run directory. Raises UsageError for a folder without one, QtoolError where its files are damaged, or where it
    is not of the weights that are there now.
    """
    from qtool.form import Plan, QuantizedModel

    run = path_of(run_of(run), argument("run"), "the path of a run directory", "name what quantize had as out=…")
    require_run_directory(run, "quantize")
    result = read_result(run, "quantize")
    if trained := result["source"].get("trained_in"):
        weights = run / trained / "model.safetensors"
        if weights.exists() and sha256_of(weights) != result["inputs"]["weights"]:
            raise QtoolError(
                f"'{run / 'int8.pt2'}'", f"a model quantized from '{weights}'", "one of earlier weights",
                "run 'qtool quantize' again",
            )  # fmt: skip
    training: dict[str, Any] = {key: result[key] for key in ("history", "metric") if key in result}
    with whole(run):
        plan = Plan.from_dict(result["plan"])
    return dataclasses.replace(QuantizedModel.load(run, plan), training=training)
