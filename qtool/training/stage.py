"""The training stage: set up the techniques, run the loop, judge the result once on the test set.

What it leaves on disk are checkpoints, under ``out/checkpoints``; the pipeline commits the weights and the
result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from qtool.data.specs import example_input
from qtool.recipe import TrainConfig
from qtool.steps.history import History
from qtool.steps.judging import judge
from qtool.steps.loop import EVALUATION, FEWER_BYTES, HasParts, fit, memory_told
from qtool.steps.order import Batches
from qtool.steps.setup import LossFunction
from qtool.steps.step import micro_size
from qtool.system.devices import resolve_device
from qtool.system.generators import seeded
from qtool.tasks import Task
from qtool.training.lora import Adapter, adapter
from qtool.training.progress import Report, reporter
from qtool.training.techniques import setup


@dataclass(frozen=True)
class TrainResult:
    """The trained model (the one that was given, in evaluation mode), its test metrics, and what happened.

    After a sharded training the first process has the weights; in the others the parameters are on the meta device.
    """

    model: nn.Module = field(repr=False)
    metrics: dict[str, float]
    history: History = field(repr=False)
    adapter: Adapter | None = field(default=None, repr=False)
    """The adapters alone, where the training was LoRA's; in the model they are merged."""


def train(
    model: nn.Module,
    data: HasParts | Iterable[tuple[Any, Any]],
    config: TrainConfig,
    *,
    task: Task,
    out: Path | None = None,
    resume: bool = True,
    progress: bool | Report | None = False,
    loss_fn: LossFunction | None = None,
    identity: Mapping[str, str] | None = None,
    backs_off: bool = False,
    halvings: int = 0,
) -> TrainResult:
    """Trains ``model`` in place as ``config`` says and judges it once on ``data.test``, where there is one.

    ``data`` is a Data, or an iterable of (input, target) batches to train on. ``out`` takes the checkpoints,
    from which a run that was stopped goes on unless ``resume`` is off. ``progress`` is True for a bar on standard
    error, or a function that takes a :class:`~qtool.steps.loop.Progress` after every step. Raises what
    :func:`qtool.steps.loop.fit` raises.
    """
    parts: Any = data if hasattr(data, "train") else SimpleNamespace(train=Batches(data), validation=None, test=None)
    test = getattr(parts, "test", None)
    test = test if test is not None and len(test) else None
    place = resolve_device(config.device), out / "checkpoints" if out else None
    with memory_told("model", "memory for its weights", f"pass --precision bf16-true, {FEWER_BYTES}", *place):
        prepared = setup(model, config, _example(parts))
    beside = memory_told("training", "memory for its data and checkpoints", EVALUATION[-1], *place)
    with prepared as made, reporter(progress) as report, beside:
        history = fit(
            model, parts, task, config, setup=made, loss_fn=loss_fn, out=out, resume=resume, progress=report,
            identity=identity, test=test, backs_off=backs_off, halvings=halvings,
        )  # fmt: skip
        with memory_told(*EVALUATION, *place), seeded(config.seed):  # for a set or a model that draws
            metrics = {} if test is None else judge(made, "test", test, micro_size(config, history.halvings), task)
        found = None if config.lora is None else adapter(model, config)  # a model's own are its weights
    return TrainResult(model, metrics, history, found)


def _example(parts: HasParts) -> Any:
    if not isinstance(parts.train, Batches):
        return example_input(parts.train)
    return None  # taking a batch from an iterator could disturb its order
