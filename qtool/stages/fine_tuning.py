"""The training of QAT: the step loop with the training techniques, on the graph that the quantizer has prepared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError
from qtool.recipe import CONTRACT_FIELDS, QatConfig, QuantizeConfig, as_dict
from qtool.source import Source
from qtool.stages.common import Progress, targets_in

if TYPE_CHECKING:
    from torch import nn

    from qtool.data.specs import Data


def fine_tuning(
    source: Source, config: QatConfig, out: Path | None, resume: bool, progress: Progress,
    identity: Mapping[str, Any], training: dict[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """What QAT calls to train its prepared graph, as ``config`` says.

    ``training`` takes what the result says of it.
    """
    from qtool.steps.order import Batches

    if source.data is None:
        raise QtoolError("quantization-aware training", "training data", "none", "pass data with labels, or mode 'ptq'")
    _require_targets(source)
    if source.parts is not None:
        _require_judged(source, source.parts)
    data: Any = source.parts or SimpleNamespace(train=Batches(source.data), validation=None)

    def fine_tune(model: nn.Module, hooks: Any, loss_fn: Any = None) -> Any:
        from qtool.data.specs import example_input
        from qtool.steps.loop import fit
        from qtool.training.progress import each_epoch, reporter
        from qtool.training.techniques import setup

        example = None if source.parts is None else example_input(data)
        with setup(model, config, example) as made, reporter(each_epoch(progress)) as report:
            made.tell_unreached = _silent  # what stays as it came is as it was trained
            history = fit(
                model, data, source.task, config, setup=made, hooks=hooks, loss_fn=loss_fn, out=out, resume=resume,
                progress=report, identity=identity,
            )  # fmt: skip
        training.update(history=as_dict(history), metric=source.task.metric)
        return history

    return fine_tune


def _silent(names: list[str], when: str) -> None:
    """Tells nothing."""


def rounded_by(config: QuantizeConfig) -> dict[str, Any]:
    """What says which quantizers are trained, and from which ranges: a checkpoint of others is not gone on from."""
    free = ("device", *CONTRACT_FIELDS)
    return {f"quantize.{name}": value for name, value in as_dict(config).items() if name not in free}


def _require_targets(source: Source) -> None:
    from qtool.data.specs import batches

    data = source.parts
    found = [next(batches(part, 1))[1] for part in (data.train, data.validation)] if data else [targets_in(source)]
    if any(target is None for target in found):
        raise QtoolError(
            "quantization-aware training", "targets", "inputs alone",
            "give (input, target), dicts with 'labels', or mode 'ptq'",
        )  # fmt: skip


def _require_judged(source: Source, data: Data) -> None:
    """Raises QtoolError where the task cannot judge what the model answers, before anything is calibrated."""
    import torch

    from qtool.data.specs import batches
    from qtool.evaluate import metrics_in
    from qtool.models.specs import modes_kept
    from qtool.steps.passes import answer

    model = source.model
    assert model is not None
    with modes_kept(model), torch.no_grad():
        model.eval()
        metrics_in(lambda inputs: answer(model, inputs), itertools.islice(batches(data.validation, 2), 1), source.task)
