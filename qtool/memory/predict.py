"""The peak of a training step, before anything is allocated.

The step that would run is run, by the same code and with the same techniques, on fake tensors: they have
shapes, dtypes, devices and lifetimes but no storage (``FakeTensorMode``). torch's ``MemTracker`` watches
every operator and every death of a tensor and keeps the sum, split by what the tensors are for; its
snapshot at the highest sum is the prediction. Two steps are taken: optimizer states come into being
during the first, and are there from the beginning of the second. Of micro-batches the first is run, before which no
gradients are there, the last, and of those between them one of each shape.

Where code asks for values, which fake tensors have not, it is told some (``qtool.memory.fakes``). The gradient scaler,
which would find an overflow in them, is left out; it holds two numbers.

What an operator allocates for itself, and gives back before it returns, is not seen by any of that; on the CPU it is
found by calling it (``qtool.memory.scratch``), on a GPU by rule (``qtool.memory.gpu_scratch``). A compiled model has
buffers of its own (``qtool.memory.compiled``).
What an allocator loses to fragmentation is not predicted.

Of several devices, what the first one needs is predicted; it has the largest share of each batch. Sharding runs as it
is, in a group whose other processes are not there: parts, gathered blocks and summed gradients have their sizes all
the same, and so have the copies that gloo makes of them on the CPU. A thread of gloo's lets go of an exchange when it
is next given the CPU, and two of them take turns: on a busy CPU up to ``late_bytes`` are measured beyond that,
twice the largest gathered block with gloo's copy, or the buckets of the first step. Copies (DDP) are one process
with that share of the batch, whose gradients lie in buckets for as long as it trains; with micro-batches they come into
being beside the buckets, and enter them with the last.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools import mod_tracker
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from qtool.errors import QtoolError
from qtool.memory.compiled import stood_in
from qtool.memory.fakes import Scalars, answered, faked, real_alone, sized_by_values
from qtool.memory.known import know
from qtool.memory.pace import StepWork
from qtool.memory.scratch import Scratch
from qtool.memory.tracker import Prediction, Tracker
from qtool.memory.trial import Oracle
from qtool.models.specs import copied
from qtool.nested import call, cut, map_tensors, num_samples, split, tensors
from qtool.recipe import TrainConfig
from qtool.steps.setup import LossFunction, Setup, no_scaler, trained
from qtool.steps.step import Part, Step
from qtool.system import processes
from qtool.system.devices import resolve_device
from qtool.system.turns import taking_turns

Prepare = Callable[[nn.Module, TrainConfig, Any], Setup]
"""(model, config, example input) -> the step that the config asks for."""
STEPS = 2


class NotPredicted(QtoolError):
    """The step may well run, and its memory cannot be told beforehand."""


@taking_turns
def predict(
    build: Callable[[], nn.Module],
    batch: tuple[Any, Any],
    config: TrainConfig,
    *,
    prepare: Prepare,
    loss: LossFunction,
    scratch: Scratch | None = None,
) -> Prediction:
    """Predicts the peak of training as ``config`` says on batches like ``batch`` (input, target).

    ``build`` makes the model, or gives one that exists, which is left alone. The step's own errors are raised as they
    are: what cannot run for real cannot be predicted. ``scratch`` remembers operators from one prediction to the next.

    Raises NotPredicted where a tensor's size depends on values in a way that ``qtool.memory.fakes`` does not know,
    and where code takes real tensors alone, such as operators of its own without a fake implementation.
    """
    scratch = scratch or Scratch()

    def attempt(oracle: Oracle) -> Prediction | Exception:
        try:
            return _prediction(build, batch, config, prepare, loss, scratch, oracle)
        except Exception as error:
            return error

    parts = _micro_batches(batch, config)
    oracle = Oracle(scratch.trials.known(parts))
    found = attempt(oracle)
    if oracle.guessed and (answers := scratch.trials.of(build, parts, loss)) and answers != oracle.answers:
        again = attempt(Oracle(answers))
        found = again if isinstance(again, Prediction) else found
    if isinstance(found, Prediction):
        return found
    if (operator := sized_by_values(found)) is not None:
        raise _not_predicted(
            "a step in which no tensor's size depends on values", f"'{operator}', whose result's does"
        ) from found
    if (asked := real_alone(found)) is not None:
        raise _not_predicted("a step that runs on tensors without values", asked) from found
    raise found


def _not_predicted(expected: str, got: str) -> NotPredicted:
    do = "train without --memory-budget and --batch-size auto: this is not predicted"
    return NotPredicted("prediction", expected, got, do)


def _prediction(
    build: Callable[[], nn.Module], batch: tuple[Any, Any], config: TrainConfig, prepare: Prepare, loss: LossFunction,
    scratch: Scratch, oracle: Oracle,
) -> Prediction:  # fmt: skip
    start = time.monotonic()
    total, share = num_samples(batch[0]), math.ceil(num_samples(batch[0]) / config.devices)
    copies = config.devices > 1 and config.strategy == "ddp"
    if copies:
        total, config = share, replace(config, devices=1, batch_size=math.ceil(config.batch_size / config.devices))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    group = processes.pretended(config.devices) if config.strategy == "fsdp" else nullcontext()
    with group, torch.random.fork_rng(devices=[]), mode, answered(), stood_in(mode, scratch):
        device = resolve_device(config.device)
        model = _fake(_built(build), device)
        value, target = map_tensors(mode.from_tensor, _some(tuple(batch), share))
        watched = oracle.at_work.watched(model) if oracle.answers else nullcontext()
        with _in_place(device), watched, prepare(model, config, _first(value)) as setup:
            if config.compile:
                _capture(setup, value)
            tracker = Tracker(setup.device, scratch)
            found = _predicted(setup, (value, target), total, loss, tracker, oracle, copies)
    return replace(found, seconds=time.monotonic() - start, guessed=oracle.guessed)


def _micro_batches(batch: tuple[Any, Any], config: TrainConfig) -> list[Any]:
    """The micro-batches of the first device's share of a batch."""
    share = math.ceil(num_samples(batch[0]) / config.devices)
    size = math.ceil(math.ceil(config.batch_size / config.devices) / config.micro_batches)
    return split(_some(tuple(batch), share), math.ceil(share / size))


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes, without storage; or with it, where its code asks for values that no fake tensor has."""
    try:
        return build()
    except Exception:
        with unset_fake_temporarily():
            return build()


def _fake(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of ``model`` on ``device`` in training mode; under a FakeTensorMode its tensors have no storage.

    Raises QtoolError for sparse tensors, whose memory nobody here tells.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise _not_predicted("weights and buffers that are no sparse tensors", f"'{name}'")
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        if not is_parameter:
            know(empty, tensor)
    return copied(model, memo).train()


@contextmanager
def _in_place(device: torch.device) -> Iterator[None]:
    """Modules are made on ``device`` and not moved: torch swaps fake parameters on a move, which then fails."""
    with faked(nn.Module, "to", lambda module, *args, **kwargs: module), device:
        yield


def _capture(setup: Setup, value: Any) -> None:
    """Has what is compiled called for the first time, with the first micro-batch of ``value``, and captured."""
    part = setup.place(_some(value, math.ceil(num_samples(value) / setup.config.micro_batches)))
    with setup.forward():
        call(setup.model, part)
    for module in setup.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _some(value: Any, count: int) -> Any:
    """``count`` samples of a batch, without the memory of the others."""
    size = num_samples(value)
    return value if size <= count else map_tensors(torch.clone, cut(value, 0, count, size))


def _first(value: Any) -> Any:
    return map_tensors(lambda t: t[:2] if t.dim() else t, value)


def _predicted(
    setup: Setup, batch: tuple[Any, Any], total: int, loss: LossFunction, tracker: Tracker, oracle: Oracle, copies: bool
) -> Prediction:
    optimizer = setup.make_optimizer(trained(setup.model))
    buckets = _buckets(setup, optimizer, batch, loss) if copies else []
    if copies and setup.device.type == "cpu":
        tracker.late = sum(p.nbytes for p in setup.model.parameters() if p.requires_grad)
    tracker.track_external(setup.model, *_nested(optimizer), *tensors(batch), *buckets)
    setup.scaler = no_scaler(setup.device)

    def tracked(model: Any, value: Any, target: Any) -> Any:
        tracker.reset_mod_stats()  # MemTracker knows one forward pass at a time
        with oracle.forward(), tracker.forward():
            return loss(model, value, target)

    step = (Step if oracle.answers else _Telling)(setup, optimizer, tracked)
    hooked = mock.patch.object(mod_tracker, "register_multi_grad_hook", tracker.hooked)
    with tracker, hooked, Scalars(oracle), _taken_for_real():
        tracker.accumulation.learn(setup.device)
        for _ in range(STEPS):
            tracker.work = StepWork()
            step(*batch, setup.config.learning_rate, total)
    return tracker.prediction()


class _Telling(Step):
    """A step without the micro-batches that do, with tensors of the same shapes, what others do: all must be alike."""

    def _parts(self, value: Any, target: Any, total: int) -> list[Part]:
        first, *others = super()._parts(value, target, total)
        between = {tuple(tensor.shape for tensor in tensors((part.value, part.target))): part for part in others[:-1]}
        return [first, *between.values(), *others[-1:]]


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """Has transformers ask fake tensors for their values, which :class:`Scalars` answers.

    Where it cannot, it makes masks and repeats keys for each layer, which it does not for real.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(library, "is_fake_tensor", return_value=False):
        yield


def _nested(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """An optimizer and those within it, some of which have their states from the first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner", None)


def _buckets(setup: Setup, optimizer: Optimizer, batch: tuple[Any, Any], loss: LossFunction) -> list[torch.Tensor]:
    """What gradients are exchanged in. Where they lie there from the first on, gradients that stay are the buckets.

    Parameters that the loss does not depend on have room there, and no gradients, for which there would be states.
    """
    exchanged = trained(setup.model)
    if setup.config.micro_batches > 1:
        return [torch.empty_like(p) for p in exchanged]
    with setup.forward():
        value = loss(setup.model, setup.place(batch[0]), setup.move(batch[1]))[0]
    gradients = torch.autograd.grad(value, exchanged, allow_unused=True)
    for parameter, gradient in zip(exchanged, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.zeros_like(parameter)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return [torch.empty_like(p) for p in exchanged if p.grad is None]
