"""The training loop: epochs, validation, early stopping, and a resume that changes nothing.

Training and quantization-aware training both stand on :func:`fit`. It knows about data order, schedule,
hooks and checkpoints; the step itself is ``qtool.steps.step``, and every technique is in its Setup.

Exact resume. A run that was killed and started again gives, bit for bit, what an undisturbed one gives.
All that the next step depends on is in the checkpoint: parameters and buffers, optimizer, gradient
scaler, random generators, also the data's and the model's own (``qtool.system.generators``), hooks, early stopping,
and the place in the data (``qtool.steps.order``). The learning rate is a function of the step and needs no state. A
checkpoint is written after each epoch, and every ``checkpoint_every`` steps; one of another recipe is refused.

Several processes (``qtool.system.processes``) run the same loop, each on its share of every batch, and draw
different random numbers. On the same number of processes the resume is exact; on another, the same
batches go to other processes, whose generators start anew, and the result is the same up to rounding
and dropout.

Left out on purpose: validation within an epoch, and more than one learning rate.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from qtool import recipe
from qtool.errors import OutOfMemory, QtoolError
from qtool.nested import to_float32
from qtool.recipe import TrainConfig
from qtool.steps import checkpoint
from qtool.steps.history import History, Progress
from qtool.steps.judging import judge, rehearse, rehearse_smallest, require_metric
from qtool.steps.nonfinite import first_bad_parameter, loss_told, remedy, told
from qtool.steps.order import Batches, Order
from qtool.steps.passes import answer
from qtool.steps.setup import LossFunction, Setup, plain, trained
from qtool.steps.step import NotFinite, Step, learning_rate, micro_size
from qtool.steps.stopping import Best
from qtool.steps.unreached import LOOKED, Unreached
from qtool.system import generators, processes
from qtool.system.devices import current, memory_used, out_of_memory
from qtool.system.generators import of_modules, own_generators
from qtool.tasks import Task, loss_of, require_own_metric
from qtool.units import bytes_told, many

FEWER_BYTES = "--lora 8 --lora-base nf4 or --strategy fsdp with more --devices"
EVALUATION = ("evaluation", "memory for it", "use a smaller --batch-size")
STATES = ("optimizer", "memory for its states", f"pass --optimizer adamw8bit, {FEWER_BYTES}")
_FREE = ("device", "devices", "checkpoint_every", "keep")
"""Keys of a recipe that may differ when a run is resumed."""


class HasParts(Protocol):
    """What ``fit`` needs of a data set: map-style ``train`` and ``validation``, or batches (see :class:`Batches`)."""

    @property
    def train(self) -> Any: ...
    @property
    def validation(self) -> Any: ...


class Hooks:
    """What a caller may do around the steps; the methods here are the defaults. Subclass and override."""

    def mode(self, model: nn.Module, training: bool) -> None:
        """Switches the model to training or evaluation (captured graphs need another way than ``train()``)."""
        model.train(training)

    def before_step(self, model: nn.Module, step: int, total: int) -> None:
        """Called before step ``step`` of ``total``, after ``mode``, and again for the first step after a resume.

        What it does to the model has to follow from ``step`` and its own state alone, or be in ``state_dict``.
        """

    def after_epoch(self, model: nn.Module, epoch: int, metrics: Mapping[str, float]) -> None:
        """Called after each epoch's validation, before its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume has to give back (numbers, texts, tensors, in dicts and lists)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave."""


def fit(
    model: nn.Module,
    data: HasParts,
    task: Task,
    config: TrainConfig,
    *,
    setup: Setup | None = None,
    hooks: Hooks | None = None,
    loss_fn: LossFunction | None = None,
    out: Path | None = None,
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    identity: Mapping[str, Any] | None = None,
    test: Any = None,
    backs_off: bool = False,
    halvings: int = 0,
) -> History:
    """Trains ``model`` in place and leaves it in evaluation mode; with early stopping, with its best weights.

    ``setup`` holds the techniques (by default none; the caller closes what it gives), ``loss_fn`` replaces
    the task's loss, ``out/checkpoints`` takes the checkpoints, ``identity`` names what else must be the
    same for a checkpoint to be resumed. The validation data, and ``test`` data that the caller will judge the model on,
    are rehearsed before the first step (``judging``). With ``backs_off`` a step that runs out of memory is made
    again in smaller micro-batches; ``halvings`` says how often they are halved to begin with. The caller's random
    generators are left as they were.

    Raises QtoolError where a part cannot be judged (before any step), where the loss is not finite (step, learning
    rate, first bad layer, last checkpoint), where a checkpoint is damaged or another recipe's, or the disk is full.
    """
    hooks = hooks or Hooks()
    with plain(model, config) if setup is None else nullcontext(setup) as made:
        try:
            with current(made.device), generators.seeded(config.seed + processes.rank()):
                run = _Run(data, task, config, made, hooks, loss_fn or task_loss(task), out, progress, identity)
                run.test, run.backs_off = test, backs_off
                run.halve(halvings)
                return run.run(resume)
        finally:
            hooks.mode(model, False)


@contextmanager
def memory_told(where: str, expected: str, do: str, device: torch.device, checkpoints: Path | None) -> Iterator[None]:
    """Raises OutOfMemory where memory runs out beside the steps, which tell it themselves."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        last = checkpoint.last_good(checkpoint.latest(checkpoints) if checkpoints else None)
        got = f"none left, {bytes_told(memory_used(device))} in use"
        raise OutOfMemory(where, expected, got, f"{do}; {last}", last) from error


def task_loss(task: Task) -> LossFunction:
    """The loss of a task, computed from the model's output in float32."""

    def loss(model: Callable[[Any], Any], value: Any, target: Any) -> Any:
        return loss_of(task, to_float32(answer(model, value)), target)

    return loss


class _Run:
    """One call of :func:`fit`."""

    def __init__(
        self,
        data: HasParts,
        task: Task,
        config: TrainConfig,
        setup: Setup,
        hooks: Hooks,
        loss: LossFunction,
        out: Path | None,
        progress: Callable[[Progress], None] | None,
        identity: Mapping[str, Any] | None,
    ) -> None:
        self.data, self.task, self.config, self.setup, self.hooks = data, task, config, setup, hooks
        self.model, self.progress = setup.model, progress
        self.folder = out / "checkpoints" if out is not None else None
        with self._memory_told(*STATES):
            self.optimizer = setup.make_optimizer(trained(self.model))
        self.unreached = Unreached(self.model, used_at_once=setup.updates_in_backward)
        setup.on_close.append(self.unreached.close)
        self.step = Step(setup, self.optimizer, loss)
        self.order = Order(data.train, config.batch_size, config.seed)
        total = config.epochs * self.order.num_batches
        self.total = total if config.max_steps is None else min(total, config.max_steps)
        self.history = History()
        self.epoch, self.batch = 0, 0
        self.largest = 0  # batch that was given so far
        self.test, self.backs_off = None, False
        self.unstored = checkpoint.Unstored(self.model)
        self.best = Best(setup, task, config.early_stopping, self.folder, self.unstored)
        self.saved: Path | None = None
        self.memory, self.look_again = 0, 0.0
        self.identity = self._identity(identity or {})

    def run(self, resume: bool) -> History:
        self.epoch_rng = generators.rng_state(self._own())
        self._start(resume)
        if self.history.steps < self.total and not self.history.stopped_early:
            self._rehearse()
        self.began = time.monotonic() - self.history.seconds
        while self.history.steps < self.total and not self.history.stopped_early:
            self._train_epoch()
            self._end_epoch()
        self.optimizer.zero_grad()  # as many bytes as the weights have, and nobody's business behind the last step
        self.best.put_back(self.history)
        return self.history

    def _train_epoch(self) -> None:
        self.hooks.mode(self.model, True)
        stop = min(self.order.num_batches, self.batch + self.total - self.history.steps)
        for value, target, size in self.order.epoch(self.epoch, self.batch, stop, self.epoch_rng):
            step = self.history.steps
            self.hooks.before_step(self.model, step, self.total)
            rate = learning_rate(self.config, step, self.total)
            if isinstance(self.data.train, Batches):
                self.step.micro_size = self._micro_size(size)
            loss = self._step(value, target, rate, size)
            self.history.losses.append(loss)
            self.batch += 1
            self._tell_unreached()
            self._report(loss, rate)
            every = self.config.checkpoint_every
            if every and self.history.steps % every == 0 and self.batch < stop:  # after the last, the epoch's own
                self._save()

    def _tell_unreached(self) -> None:
        """Tells, when the first steps of a run are done, what no gradient has reached in those that were made here."""
        self.unreached.look()
        steps = self.history.steps
        if steps >= min(LOOKED, self.total) and (names := self.unreached.close()):
            self.setup.tell_unreached(names, f"the first {many(steps, 'step')}")

    def _micro_size(self, size: int) -> int:
        """Of a given batch of that many samples; what a longer one leaves to batch-norm, a short one does too."""
        self.largest = max(self.largest, size)
        own, asked = (micro_size(self.config, self.history.halvings, count) for count in (size, self.largest))
        return max(own, min(self.step.fewest, asked))

    def _step(self, value: Any, target: Any, rate: float, size: int) -> float:
        """One step; with ``backs_off``, once more in smaller micro-batches for as long as memory runs out."""
        before = self._restorer() if self.backs_off else None
        while True:
            try:
                return self.step(value, target, rate, size)
            except NotFinite as error:
                raise self._not_finite(error, rate) from error
            except Exception as error:
                if not out_of_memory(error):
                    raise
                used = memory_used(self.setup.device)
            self.optimizer.zero_grad()
            if before is None or self.step.updating or not self.halve(self.history.halvings + 1):
                raise self._no_memory(used)
            before()

    def _restorer(self) -> Callable[[], None]:
        """What puts generators and buffers back to where they are before a step."""
        stored, others = checkpoint.restorer(self.model, checkpoint.statistics(self.model)), self.unstored.kept()

        def restore() -> None:
            stored()
            self.unstored.put_back(others)

        return restore

    def halve(self, times: int) -> bool:
        """Halves micro-batches until they were ``times`` times; False where they are as small as can be before that."""
        while self.history.halvings < times and self.step.halve():
            self.history.halvings += 1
        return self.history.halvings >= times

    def _end_epoch(self) -> None:
        processes.agree_on_buffers(self.model)
        losses = self.history.losses[-self.batch :]
        metrics = {"loss": sum(losses) / len(losses), **self._validate()}
        self.history.epochs.append(metrics)
        self.history.ends.append(self.history.steps)
        self.history.skipped_steps = self.step.skipped
        self._report(metrics["loss"], learning_rate(self.config, self.history.steps - 1, self.total), ends=True)
        best = self.best.judge(self.history, self.epoch, metrics, to_come=self.history.steps < self.total)
        self.hooks.after_epoch(self.model, self.epoch, metrics)
        self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_rng = generators.rng_state(self._own())
        self._save()
        if best:
            self.best.keep()

    # Validation

    def _rehearse(self) -> None:
        """Tries the smallest share of a batch and one batch of each part that will be judged, before the first step."""
        parts = {"validation": self.data.validation, "test": self.test}
        given = {name: part for name, part in parts.items() if part is not None}
        rehearse_smallest(self.step, self.data.train, self.order.sizes(self.total), self.hooks.mode)
        self.hooks.mode(self.model, False)
        try:
            with self._memory_told(*EVALUATION):
                names = rehearse(self.setup, self.data.train, given, self.step.micro_size, self.task)
        except OutOfMemory:
            if self.backs_off:  # the first step will have smaller micro-batches
                return
            raise
        if self.config.early_stopping is not None:
            require_metric(names.get("validation", set()), self.task)
        for given_names in (found for found in names.values() if found is not None):
            require_own_metric(self.task, given_names)

    def _validate(self) -> dict[str, float]:
        if self.data.validation is None:
            return {}
        self.hooks.mode(self.model, False)
        with self._memory_told(*EVALUATION):
            metrics = judge(self.setup, "validation", self.data.validation, self.step.micro_size, self.task)
        return {f"validation_{name}": value for name, value in metrics.items() if name != "num_samples"}

    # Checkpoints

    def _start(self, resume: bool) -> None:
        if self.folder is None:
            return
        found = processes.from_first(checkpoint.latest(self.folder))
        if found is not None and resume:
            self._load(found)
        elif found is not None and processes.rank() == 0:
            checkpoint.clear(self.folder)

    def _save(self) -> None:
        self.history.seconds = time.monotonic() - self.began
        if (name := first_bad_parameter(self.model, buffers=True)) is not None:
            raise self._error(f"a non-finite value in {told(self.model, name)}")
        if self.folder is not None:
            processes.agree_on_buffers(self.model)
            rest = self._state()
            self.saved = self.setup.files.commit(self.folder, self.history.steps, rest, self.model, self.optimizer)

    def _state(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "scaler": self.setup.scaler.state_dict(),
            "hooks": self.hooks.state_dict(),
            "history": asdict(self.history),
            "place": {
                "epoch": self.epoch,
                "batch": self.batch,
                "waited": self.best.waited,
                "skipped": self.step.skipped,
                "largest": self.largest,
            },
            "buffers": {"now": self.unstored.moved(), "best": self.best.moved},
            "rng": checkpoint.all_rng_states(self._own()),
            "epoch_rng": self.epoch_rng,
        }

    def _load(self, path: Path) -> None:
        state = self.setup.files.read(path)
        self._check_identity(path, state["identity"])
        with self._memory_told(*STATES):
            self.setup.files.restore(state, self.model, self.optimizer)
        self.setup.scaler.load_state_dict(state["scaler"])
        self.hooks.load_state_dict(state["hooks"])
        buffers = state.get("buffers", {"now": {}, "best": {}})  # checkpoints of earlier versions have none
        self.unstored.put_back(buffers["now"])
        self.best.moved = buffers["best"]
        self.history = History(**state["history"] | {"halvings": self.history.halvings})
        self.halve(state["history"].get("halvings", 0))
        place = state["place"]
        self.epoch, self.batch, self.best.waited = place["epoch"], place["batch"], place["waited"]
        self.step.skips, self.largest = place["skipped"], place.get("largest", 0)
        self.epoch_rng = state["epoch_rng"]
        if len(state["rng"]) == processes.size():
            generators.set_rng_state(state["rng"][processes.rank()], self._own())
        self.saved = path
        if self.history.steps >= LOOKED:
            self.unreached.close()
        if not self.batch and self.history.best_epoch == self.epoch - 1:
            self.best.keep()

    def _own(self) -> dict[str, Any]:
        """The generators that data and model have for themselves, as far as they are there by now."""
        return own_generators(train=self.data.train, validation=self.data.validation) | of_modules(self.model)

    def _identity(self, more: Mapping[str, Any]) -> dict[str, Any]:
        shapes = str([(name, tuple(p.shape), str(p.dtype)) for name, p in self.model.named_parameters()])
        return {
            **{name: value for name, value in recipe.as_dict(self.config).items() if name not in _FREE},
            "data": getattr(self.data, "identity", None),
            "task": self.task.name,
            "model's parameters": hashlib.sha256(shapes.encode()).hexdigest()[:12],
            **more,
        }

    def _check_identity(self, path: Path, found: Mapping[str, Any]) -> None:
        now = self.identity
        keys = [key for key in {**found, **now} if found.get(key) != now.get(key)]
        if keys:
            differing = ", ".join(f"{key} ({found.get(key)} there, {now.get(key)} here)" for key in keys)
            got, do = f"one that differs in {differing}", "use another run directory, or start over with --no-resume"
            raise QtoolError(f"checkpoint '{path}'", "a checkpoint of this recipe", got, do)

    # Telling

    def _report(self, loss: float, rate: float, ends: bool = False) -> None:
        if self.progress is not None:
            last = self.history.epochs[-1] if self.history.epochs else {}
            if (now := time.monotonic()) >= self.look_again:  # to ask takes as long as tens of kernels
                self.memory, self.look_again = memory_used(self.setup.device), now + 0.1
            done, metric = self.history.steps, self.task.metric
            self.progress(Progress(done, self.total, self.epoch, loss, rate, self.memory, last, metric, ends))

    def _not_finite(self, error: NotFinite, rate: float) -> QtoolError:
        return self._error(loss_told(self.model, error.value, rate, error.forward))

    def _memory_told(self, where: str, expected: str, do: str) -> AbstractContextManager[None]:
        return memory_told(where, expected, do, self.setup.device, self.folder)

    def _no_memory(self, used: int) -> OutOfMemory:
        where = f"training step {self.history.steps + 1}"
        whose = "" if self.setup.device.type == "cuda" else " by the process"
        got = f"none left, {bytes_told(used)} in use{whose}"
        return OutOfMemory(where, "memory for it", got, f"use a smaller --batch-size; {self._last()}", self._last())

    def _last(self) -> str:
        return checkpoint.last_good(self.saved)

    def _error(self, got: str) -> QtoolError:
        do = f"{remedy(got, self.config.precision, stepped=self.history.steps > 0)}; {self._last()}"
        return QtoolError(f"training step {self.history.steps + 1}", "a finite loss", got, do)
