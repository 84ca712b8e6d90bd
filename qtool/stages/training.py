"""The training stage: a model and its data, to weights that a run directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import atomic_path, read_result, staging, write_json, write_result
from qtool.recipe import TrainConfig, as_dict
from qtool.source import Source, open_source
from qtool.stages.common import AnyPath, Progress, configured, drop_checkpoints, finished, tidy, writable

if TYPE_CHECKING:
    from torch import nn

    from qtool.tasks import Task
    from qtool.training.stage import TrainResult


def train(
    model: nn.Module | str,
    data: object,
    *,
    out: AnyPath | None = None,
    task: Task | str = "classification",
    weights: AnyPath | None = None,
    resume: bool = True,
    config: TrainConfig | None = None,
    progress: Progress = False,
    **options: Any,
) -> TrainResult:
    """Trains ``model`` on ``data`` and returns it with its metrics; with ``out`` it also writes the run directory.

    ``model`` is a module (trained in place) or a spec; ``data`` a spec, a Data, a mapping of datasets or an iterable
    of (input, target) batches. With ``resume`` a run that was stopped in ``out`` continues, and a finished one whose
    configuration and inputs are the same is returned as it is. ``options`` are the fields of TrainConfig.
    """
    config = configured(TrainConfig, config, options)
    from qtool.training import rules

    rules.check(config)
    folder = writable(out)
    source = open_source(model, data, task, weights, seed=config.seed, label_smoothing=config.label_smoothing)
    if folder and resume and finished(folder, "train", as_dict(config), source.inputs):
        return _trained(folder, source)
    from qtool.training import stage

    assert source.model is not None
    with tidy(folder):
        result = stage.train(
            source.model, source.data, config, task=source.task, out=folder, resume=resume,
            progress=progress is True, identity=source.inputs,
        )  # fmt: skip
        if folder:
            _commit_train(folder, config, source, result)
    return result


def _write_adapter(folder: Path, result: TrainResult) -> dict[str, Path]:
    """The adapters alone, under the names that peft's ``from_pretrained`` of a folder looks for."""
    from safetensors.torch import save_file

    if result.adapter is None:
        return {}
    files = {"adapter": folder / "adapter_model.safetensors", "adapter_config": folder / "adapter_config.json"}
    with atomic_path(files["adapter"]) as temporary:
        save_file(result.adapter.tensors, str(temporary))
    write_json(files["adapter_config"], result.adapter.config)
    return files


def _trained(run: Path, source: Source) -> TrainResult:
    """The result of a finished training, with its weights in the model."""
    from qtool.loop import History
    from qtool.models import load_weights
    from qtool.training.stage import TrainResult

    assert source.model is not None
    result = read_result(run, "train")
    load_weights(source.model, run)
    return TrainResult(source.model.eval(), result["metrics"], History(**result["history"]))


def _commit_train(run: Path, config: TrainConfig, source: Source, result: TrainResult) -> None:
    from safetensors.torch import save_model

    with staging(run, "train") as folder:
        weights = folder / "model.safetensors"
        with atomic_path(weights) as temporary:
            save_model(result.model, str(temporary))
        write_result(
            run, "train", config=as_dict(config), inputs=source.inputs,
            outputs={"model": weights, **_write_adapter(folder, result)},
            metrics=result.metrics, extra={"source": source.record, "history": as_dict(result.history)},
        )  # fmt: skip
    drop_checkpoints(run)
