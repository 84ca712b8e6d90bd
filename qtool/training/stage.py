"""The training stage: set up the techniques, run the loop, judge the result once on the test set.

What it leaves on disk are checkpoints, under ``out/checkpoints``; the pipeline commits the weights and the
result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qtool.checkpoint import last_good, latest
from qtool.data import example_input
from qtool.devices import memory_used, out_of_memory, resolve_device
from qtool.errors import OutOfMemory
from qtool.judging import judge
from qtool.loop import HasParts, History, fit
from qtool.order import Batches
from qtool.recipe import TrainConfig
from qtool.step import LossFunction, micro_size
from qtool.tasks import Task
from qtool.training.lora import Adapter, adapter
from qtool.training.progress import Report, reporter
from qtool.training.techniques import setup
from qtool.units import bytes_told

_FEWER_BYTES = "pass --precision bf16-true, --lora 8 --lora-base nf4 or --strategy fsdp with more --devices"


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
    error, or a function that takes a :class:`~qtool.loop.Progress` after every step. Raises what
    :func:`qtool.loop.fit` raises.
    """
    parts: Any = data if hasattr(data, "train") else SimpleNamespace(train=Batches(data), validation=None, test=None)
    test = getattr(parts, "test", None)
    test = test if test is not None and len(test) else None
    device = resolve_device(config.device)
    with _memory_told("model", "memory for its weights", _FEWER_BYTES, device, out):
        prepared = setup(model, config, _example(parts))
    beside = _memory_told("evaluation", "memory for it", "use a smaller --batch-size", device, out)
    with prepared as made, reporter(progress) as report, beside:
        history = fit(
            model, parts, task, config, setup=made, loss_fn=loss_fn, out=out, resume=resume, progress=report,
            identity=identity, test=test, backs_off=backs_off, halvings=halvings,
        )  # fmt: skip
        metrics = {} if test is None else judge(made, "test", test, micro_size(config, history.halvings), task)
        found = None if config.lora is None else adapter(model, config)  # a model's own are its weights
    return TrainResult(model, metrics, history, found)


def _example(parts: HasParts) -> Any:
    if not isinstance(parts.train, Batches):
        return example_input(parts.train)
    return None  # taking a batch from an iterator could disturb its order


@contextmanager
def _memory_told(where: str, expected: str, do: str, device: torch.device, out: Path | None) -> Iterator[None]:
    """Raises OutOfMemory where memory runs out beside the steps, which tell it themselves."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        used, last = memory_used(device), last_good(latest(out / "checkpoints") if out else None)
        got = f"none left, {bytes_told(used)} in use"
        raise OutOfMemory(where, expected, got, f"{do}; {last}", last) from error
