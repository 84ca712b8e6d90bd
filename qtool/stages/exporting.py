"""The export stage: a quantized model, to ONNX files that passed their gates."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import mark_stale, read_result, staging, write_result
from qtool.data.calibration_data import draw
from qtool.data.given import inputs_of
from qtool.errors import ContractError, UsageError, kind_of
from qtool.lineage import content_of
from qtool.options import argument, documented
from qtool.recipe import ExportConfig, as_dict
from qtool.source import UNIDENTIFIED, data_facts, open_data, recall_source, require_run_directory
from qtool.stages.common import (
    AnyPath,
    Progress,
    configured,
    finished,
    in_turn,
    required_folder,
    seen_from,
    teller,
    writable,
)
from qtool.stages.quantization import load_quantized
from qtool.stages.served import contract_gate

if TYPE_CHECKING:
    from torch import nn

    from qtool.data.specs import Data
    from qtool.exporting.gates.gate import Gate
    from qtool.exporting.stage import ExportResult
    from qtool.form import QuantizedModel
    from qtool.tasks import Task

OF_DATA = ("labels", "preprocessing")
"""What files tell of the data that their model is for."""


@in_turn
@documented(ExportConfig)
def export(
    quantized: QuantizedModel | nn.Module | AnyPath,
    out: AnyPath | None = None,
    *,
    samples: Iterable[Any] | Data | Mapping[str, Any] | str | None = None,
    validation: Iterable[Any] | None = None,
    task: Task | str | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    float_model: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
    trust: bool = False,
    resume: bool = False,
    config: ExportConfig | None = None,
    progress: Progress = False,
    **options: Any,
) -> ExportResult:
    """Exports to ONNX, proves the file by the gates, and commits the files to ``out``.

    ``quantized`` is a run directory, a QuantizedModel, or a module that was prepared or converted with eager
    ``torch.ao.quantization`` (then with ``example_inputs``, and ``float_model`` for the gates that compare with it).
    ``samples`` are what parity is judged on: batches, or data to draw them from, whose labels and preprocessing then
    go into the files; by default the calibration samples that the run directory recorded. ``metadata`` goes into the
    files too, as JSON, each of its names behind ``qtool.``; ``labels`` and ``preprocessing`` replace the data's. A
    contract that the run was quantized under is judged again on the file, on the same validation samples and by the
    same task (``validation`` and ``task`` where those were objects). Raises ContractError where a gate or that contract
    fails: then no file takes its name, and an older export is marked stale.
    """
    config = configured(ExportConfig, config, options)
    require_use(config)
    notes = _plain(metadata or {})
    held: Callable[[Path], Gate] | None = None
    if isinstance(quantized, str | Path):
        run = require_run_directory(Path(quantized), "quantize")
        recorded = read_result(run, "quantize")
        model, folder, record = (
            load_quantized(run),
            writable(out) or writable(run) or run,
            _absolute(run, recorded["source"]),
        )
        inputs = {
            "quantized": recorded["outputs"]["int8"]["sha256"],
            "quantized_in": os.path.relpath(run.resolve(), folder.resolve()),
            "source": _digest(recorded["source"] | notes),
        }
        if resume and finished(folder, "export", as_dict(config), inputs, teller(progress)):
            return _exported(folder)
        asked = config.gates or config.tune or recorded["source"]["data"] is not None
        drawn = _recorded_samples(run, recorded, trust) if samples is None and asked else None
        if recorded.get("contract") and config.gates:
            held = functools.partial(contract_gate, run, recorded, model, validation=validation, task=task, trust=trust)
    else:
        folder, record, drawn = required_folder(out), {}, None
        model = _as_quantized(quantized, example_inputs, float_model)
        inputs = {"quantized": UNIDENTIFIED, "content": content_of(model.graph)}
    batches, facts = _opened(samples, config) if drawn is None else (drawn, {})
    record = seen_from(folder, record) | facts | {name: notes[name] for name in OF_DATA if name in notes}
    tell = teller(progress)
    tell("export: writing and proving the files")
    return _export_into(folder, model, config, batches, inputs, record, notes, held, tell)


def require_use(config: ExportConfig) -> None:
    """Raises UsageError for what says how to tune where nothing is tuned, or how a gate judges where none does."""
    read_by = {"tune": ("tune_threads", "tune_batch_size", "tune_seconds"), "gates": ("reference_samples",)}
    for other in (name for name in read_by if not getattr(config, name)):
        for name in read_by[other]:
            if getattr(config, name) != getattr(ExportConfig(), name):
                got = {"tune": "no tuning", "gates": "no gates"}[other]
                raise UsageError(argument(name), f"'{other}' beside it", got, "add it, or leave it out")


def _plain(metadata: Any) -> dict[str, Any]:
    """What files are to tell, as plain values. Raises UsageError for what JSON does not have, and qtool's own names."""
    from qtool.exporting.stage import OWN_NOTES

    where, do = argument("metadata"), "pass for example {'commit': 'c0ffee'}"
    if not isinstance(metadata, Mapping) or not all(isinstance(name, str) for name in metadata):
        raise UsageError(where, "a mapping of names to values", kind_of(metadata), do)
    if own := next((name for name in metadata if name in OWN_NOTES), None):
        raise UsageError(where, "names that qtool does not use", f"'{own}'", "give it another name")
    for name, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(where, "values that JSON has", f"{kind_of(value)} as '{name}': {error}", do) from None
    return dict(metadata)


def _digest(record: Mapping[str, Any]) -> str:
    """The sha256 of a source's record, which an export hands on: labels and preprocessing in its files, the data."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _absolute(run: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as read from ``run``, its training's path made independent of where the run lies."""
    return dict(record) | (
        {"trained_in": str((run / record["trained_in"]).resolve())} if "trained_in" in record else {}
    )


def _opened(samples: Any, config: ExportConfig) -> tuple[Iterable[Any] | None, dict[str, Any]]:
    """Batches of inputs, and what the files are to say of the data that they were drawn from."""
    if isinstance(samples, str | Mapping) or hasattr(samples, "train"):
        data = open_data(samples, 0)
        return draw(f"train:{config.parity_samples}", data, 0, 32)[0], data_facts(data)
    return None if samples is None else inputs_of(samples), {}


def _export_into(
    folder: Path,
    model: QuantizedModel,
    config: ExportConfig,
    samples: Iterable[Any] | None,
    inputs: Mapping[str, str],
    record: Mapping[str, Any],
    notes: Mapping[str, Any],
    held: Callable[[Path], Gate] | None,
    tell: Callable[[str], None],
) -> ExportResult:
    from qtool.exporting import stage

    metadata = {**notes, **{key: record[key] for key in OF_DATA if record.get(key) is not None}}
    found: dict[str, Any] = {}
    if config.tune:
        from qtool.stages.tuning import tuned

        samples = None if samples is None else list(samples)
        model, found["tuning"] = tuned(model, folder, config, samples)
    try:
        with staging(folder, "export", tell) as place:
            result = stage.export(model, place, config, samples=samples, metadata=metadata)
            gates, extra = result.gates, {"source": dict(record), "plan": model.plan.as_dict()}
            if held is not None:
                gate = held(result.files["int8"])
                gate.require()
                gates, extra = [*gates, gate.as_dict()], extra | {"contract": gate.details or {"met": None}}
            write_result(
                folder, "export", config=as_dict(config), inputs=inputs, outputs=result.files,
                metrics={"gates": gates} | found, extra=extra,
            )  # fmt: skip
    except ContractError as error:
        mark_stale(folder, "export", f"a later export failed its gate ({error.where}: got {error.got})")
        raise
    return _exported(folder)


def _exported(run: Path) -> ExportResult:
    from qtool.exporting.stage import ExportResult

    result = read_result(run, "export")
    files = {name: run.absolute() / entry["file"] for name, entry in result["outputs"].items()}
    return ExportResult(files, result["metrics"]["gates"], result["metrics"].get("tuning"))


def _as_quantized(model: Any, example_inputs: tuple[Any, ...] | None, float_model: nn.Module | None) -> QuantizedModel:
    from qtool.form import QuantizedModel

    if isinstance(model, QuantizedModel):
        return model
    from qtool.quantization.engines.eager import from_eager, require_eager

    require_eager(model)
    if example_inputs is None:
        raise UsageError(
            argument("example_inputs"), "example inputs for a module quantized elsewhere", "none",
            "pass example_inputs=(tensor,)",
        )  # fmt: skip
    return from_eager(model, example_inputs, float_model=float_model)


def _recorded_samples(run: Path, recorded: Mapping[str, Any], trust: bool) -> Iterable[Any]:
    """The calibration samples of a quantized model, drawn again from its record."""
    config = recorded["config"]
    source = recall_source(run, "quantize", trust=trust, argument="samples")
    return draw(config["calibration"], source.parts, config["seed"], config["calibration_batch_size"])[0]
