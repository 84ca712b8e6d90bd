"""What a training is judged on: its validation and its test part, run by the step's own model.

:func:`judge` gives the metrics of a part. :func:`rehearse` judges one batch of each part before the first step, by the
same code: a metric that raises, or a part with samples of another shape, would otherwise be found after an epoch, or
when all are over. So would batch-norm to which the last batch leaves a single sample: :func:`rehearse_smallest`.
What one batch cannot show is left to the whole: memory that a smaller micro-batch would need less of, and a ``finish``
that cannot compute with what an untrained model gets right in one batch (0/0).

It also tells of a task that returns means, or whose output and target have shapes that PyTorch stretches to each other
(N×1 and N): what it makes of a batch is then far from what it makes of the batch's halves. And of a model that is to
tell the next token and has read it, as BERT has: other tokens in the later half change what it says of the earlier.

A rehearsal leaves no trace in generators and buffers. Compiled models run uncompiled in it, since what is compiled
first decides what is compiled next. It takes less memory than the judging that it stands for: no gradients are there,
and no optimizer states.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qtool.data.labels import IGNORED
from qtool.data.specs import batches
from qtool.errors import OutOfMemory, QtoolError, QtoolWarning, UsageError
from qtool.evaluate import Sums, evaluate, metrics_in, shared_batches
from qtool.nested import cut, num_samples, packed, tensors
from qtool.steps import checkpoint
from qtool.steps.order import Batches
from qtool.steps.setup import Setup
from qtool.steps.step import Step
from qtool.system import processes
from qtool.system.generators import own_generators
from qtool.tasks import Task

APART = 0.25
"""How far the sums over a batch may be from those over its halves, as a share of the greatest, before it is told."""
SEEN = 1e-5
"""How far answers may move by tokens behind them, as a share of the greatest; those of causal models hardly round."""


def judge(setup: Setup, name: str, part: Any, size: int, task: Task) -> dict[str, float]:
    """The metrics of ``part``, a data set or batches, in batches of ``size``. The model's mode is the caller's.

    A loss that is not finite does not end a training, which may come back from it; it is told by a QtoolWarning.
    """
    metrics = evaluate(setup.predict, _batches(setup, part, size), task)
    if not math.isfinite(loss := metrics.get("loss", 0.0)):
        warnings.warn(
            f"{name} data: the loss is {loss}, so that metrics say nothing: of some sample the model's output in "
            "evaluation mode, or its loss, is not finite",
            QtoolWarning,
            stacklevel=2,
        )
    return metrics


def rehearse(setup: Setup, train: Any, parts: Mapping[str, Any], size: int, task: Task) -> dict[str, set[str] | None]:
    """The names of the metrics that :func:`judge` will give of each part (None where one batch does not tell).

    Raises what it would raise, and names the part, unless samples of ``train`` fare no better.
    """
    own = own_generators(train=train, **parts)
    restore = checkpoint.restorer(setup.model, setup.model.buffers(), own)
    try:
        with torch.compiler.set_stance("force_eager"):
            return {
                name: _rehearsed(setup, train, name, part, size, task, i == 0)
                for i, (name, part) in enumerate(parts.items())
            }
    finally:
        restore()


def rehearse_smallest(
    step: Step, train: Any, sizes: Collection[int], switch: Callable[[nn.Module, bool], None]
) -> None:
    """A forward pass of one training sample, if that is what batches of ``sizes`` leave to some of several processes.

    Batch-norm over features cannot take it; a model without batch-norm is not asked. ``switch`` puts a model into
    training mode, or into the other.
    """
    size = min(sizes, key=step.smallest, default=0)
    if processes.size() == 1 or step.fewest == 1 or not size or step.smallest(size) > 1:
        return
    setup = step.setup
    restore = checkpoint.restorer(setup.model, setup.model.buffers(), own_generators(train=train))
    try:
        with torch.compiler.set_stance("force_eager"):
            switch(setup.model, True)
            setup.predict(next(batches(train, 1, order=[0]))[0])
    except QtoolError as error:
        where = f"{error.where}, on the one sample of a batch of {size} that is left to a process"
        raise type(error)(where, error.expected, error.got, error.do) from error
    finally:
        restore()


def _rehearsed(setup: Setup, train: Any, name: str, part: Any, size: int, task: Task, tell: bool) -> set[str] | None:
    try:
        return _first(setup, part, size, task, tell=tell)
    except OutOfMemory:
        raise
    except QtoolError as error:
        if not _takes(setup, train, task):
            raise
        raise type(error)(f"{error.where}, on {name} data", error.expected, error.got, error.do) from error


def _first(setup: Setup, part: Any, size: int, task: Task, *, tell: bool = False) -> set[str] | None:
    held = list(itertools.islice(_batches(setup, part, size), 1))
    outputs = [setup.predict(value) for value, _ in held]
    names = metrics_in(lambda _: outputs[0], held, task)
    if outputs and tell:
        _tell_what_is_no_sum(task, outputs[0], held[0][1])
        _tell_what_it_has_read(setup, *held[0])
    return names


def _tell_what_is_no_sum(task: Task, output: Any, target: Any) -> None:
    """Warns of a task whose sums over a batch are far from those over its halves."""
    if (size := num_samples(output)) < 4:
        return
    cuts = [(0, size), (0, size // 2), (size // 2, size)]
    try:
        whole, *halves = (
            _sums(task, *(cut(value, low, high, size) for value in (output, target))) for low, high in cuts
        )
    except (QtoolError, ValueError, IndexError):  # one that takes whole batches alone
        return
    for name, value in whole.items():
        parts = [half.get(name, 0.0) for half in halves]
        if abs(value - sum(parts)) > APART * max(map(abs, [value, *parts])):
            warnings.warn(
                f"task '{task.name}': its {name} of a batch is {value:.3g}, of the halves of the batch "
                f"{parts[0]:.3g} and {parts[1]:.3g}, which is no sum over samples: figures depend on the batch size; "
                f"return sums and the number of samples{_shapes(output, target)}",
                QtoolWarning,
                stacklevel=2,
            )
            return


def _tell_what_it_has_read(setup: Setup, value: Any, target: Any) -> None:
    """Warns of a model that reads the token that it is to tell, by two samples. Of several processes, none asks."""
    if processes.size() > 1 or not any(_is_followed_by(each, target) for each in tensors(value)):
        return
    with suppress(QtoolError):  # a batch that cannot be cut
        few, target = cut(value, 0, 2, len(target)), target[:2]
        others = packed(few, [_turned(each) if _is_followed_by(each, target) else each for each in tensors(few)])
        moved, size = _change(setup.predict(few), setup.predict(others), target.shape)
        if moved > SEEN * size:
            warnings.warn(
                "model: it is to tell the next token, and reads it: later tokens change its answers by "
                f"{moved:.2g}, so that loss and perplexity are of copying; train a causal one (…ForCausalLM), or give "
                "data whose targets are masked tokens",
                QtoolWarning,
                stacklevel=2,
            )


def _change(before: Any, after: Any, shape: torch.Size) -> tuple[float, float]:
    """How far the answers to the earlier half of sequences of this shape, N×T, differ, and how large they are."""
    half = shape[1] // 2
    pairs = zip(tensors(before), tensors(after), strict=True)
    found = next(((a[:, :half], b[:, :half]) for a, b in pairs if a.shape[:2] == shape), None)
    return (0.0, 0.0) if found is None else (float((found[1] - found[0]).abs().max()), float(found[0].abs().max()))


def _turned(tokens: Tensor) -> Tensor:
    """Tokens, N×T, with those of the later half the other way round."""
    half = tokens.shape[1] // 2
    return torch.cat([tokens[:, :half], tokens[:, half:].flip(1)], 1)


def _is_followed_by(tokens: Tensor, target: Any) -> bool:
    """Whether the targets of tokens, N×T, are the ones that follow them, where there are any."""
    if not isinstance(target, Tensor) or target.shape != tokens.shape or tokens.ndim != 2 or tokens.shape[1] < 4:
        return False
    known, tokens = target[:, :-1] != IGNORED, tokens.to(target.device)
    return bool(known.any()) and torch.equal(tokens[:, 1:][known], target[:, :-1][known])


def _sums(task: Task, output: Any, target: Any) -> dict[str, float]:
    sums = Sums(task)
    sums.add(output, target)
    weight, found = sums.values
    return {"loss": found["loss"], "weight": weight, **found}


def _shapes(output: Any, target: Any) -> str:
    """Shapes that PyTorch stretches to each other, which is mostly not meant."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.shape == target.shape:
        return ""
    if output.numel() != target.numel():
        return ""
    return f", and mind that outputs are {tuple(output.shape)} and targets {tuple(target.shape)}"


def _takes(setup: Setup, train: Any, task: Task) -> bool:
    """Whether two training samples can be judged; of several processes or of batches it is not tried, and thought so.

    The other processes may be elsewhere, and taking a batch from an iterator could disturb its order.
    """
    if isinstance(train, Batches) or processes.size() > 1:
        return True
    with suppress(QtoolError):
        _first(setup, train, 2, task)
        return True
    return False


def require_metric(names: Collection[str] | None, task: Task) -> None:
    """Raises UsageError where the metric that decides is not among ``names``, those of the validation data."""
    if names is not None and task.metric not in names:
        raise UsageError(
            "early stopping", f"validation data with the metric '{task.metric}'", ", ".join(sorted(names)) or "none",
            "give validation data, correct the task's 'metric', or switch early stopping off",
        )  # fmt: skip


def _batches(setup: Setup, part: Any, size: int) -> Iterator[tuple[Any, Any]]:
    held = part if isinstance(part, Batches) else shared_batches(part, size, setup.predict)
    return ((value, setup.move(target)) for value, target in held)
