"""What the training stage does about memory: batches found by themselves, a budget kept to, and words for its end.

``--batch-size auto`` predicts the largest batch that fits what is free, trains with it, and where that still runs out
of memory halves the micro-batch and repeats the step; the batch, and with it the training, stays what it was. What was
found is kept beside the checkpoints (``qtool.stages.choice``), so that a run that is resumed goes on as itself.

``--memory-budget`` has ``qtool.memory.plan`` choose. On a GPU the allocator then refuses more than the budget; on the
CPU, where no allocator can, the prediction alone stands for it.

Of several devices the budget is for each, and the processes of one machine share its host memory. The first process
predicts, before they meet. A step in which one of them has run out of memory cannot be repeated, since the others wait
in the middle of it: all are started again from the last checkpoint, with micro-batches half as large. Under
``torchrun`` it is the one to start them (``--max-restarts``), or the user.

Host memory that runs out mostly shows as a process that the system has killed. It is taken for that where the system's
own count of such kills has risen meanwhile, since a user's ``kill -9`` looks the same, and then the run goes on in
smaller micro-batches too: at once where this process has started the others, else when the command is given again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import OutOfMemory, QtoolError, UsageError
from qtool.recipe import AUTO, TrainConfig
from qtool.source import Source
from qtool.stages import choice
from qtool.stages.choice import Choice
from qtool.stages.common import Progress, meter, teller
from qtool.units import MIB, bytes_told

if TYPE_CHECKING:
    from qtool.memory.plan import Plan
    from qtool.memory.tracker import Prediction
    from qtool.system.launcher import Killed

SHARE = 0.9
"""Of the free memory, what a batch found by itself may take; the rest is the allocator's and the system's."""
STEPS_PER_EPOCH = 8
"""The least that a batch found by itself leaves of an epoch."""
EXPLAINED = 8
"""The most that is predicted to explain an end of memory, which nobody wants to wait long for."""


def fitted(config: TrainConfig, source: Source, folder: Path | None, resume: bool, progress: Progress) -> Choice:
    """``config`` with the batch size and the techniques that it left to the memory there is, and why.

    A run that is resumed keeps those that were chosen for it. Raises UsageError for a budget that no choice of
    techniques reaches: the smallest need, and the flags of it.
    """
    if not resume:
        choice.forget(folder)
    if config.batch_size != AUTO and config.memory_budget is None:
        return Choice(config)
    if kept := choice.recorded(folder, config, source.inputs):
        return _again(kept, source, progress)
    found = Choice(config)
    looked: list[dict[str, Any]] = []
    if config.batch_size == AUTO:
        found = _with_batch(config, source, looked, progress)
    if config.memory_budget is not None:
        found = _within(found, source, looked, progress)
    found = _told(config, found, looked)
    choice.record(folder, config, source.inputs, found.memory or {})
    return found


def _told(asked: TrainConfig, found: Choice, looked: list[dict[str, Any]]) -> Choice:
    """With all that the result of the run says of the choice."""
    from qtool.memory.plan import difference, flags

    chosen = difference(asked, found.config)
    wanted = ["--batch-size auto"] if asked.batch_size == AUTO else []
    wanted += [f"--memory-budget {asked.memory_budget}"] if asked.memory_budget is not None else []
    about = {"asked": " ".join(wanted), "chosen": chosen, "flags": flags(chosen), "considered": looked}
    return Choice(found.config, about | (found.memory or {}))


def _again(kept: Choice, source: Source, progress: Progress) -> Choice:
    """What was chosen before. Raises UsageError where it does not keep to the budget on the devices there are now."""
    assert kept.memory is not None
    flags, budget = kept.memory["flags"] or "it as it is", _budget(kept.config)
    if kept.moved and budget is not None and (peak := Predictor(source)(kept.config)) > budget:
        raise UsageError(
            "--memory-budget", f"at least {-(-peak // MIB)}MiB{_each(kept.config)} for {flags}, as this run began",
            str(kept.config.memory_budget), "train on devices as before, or start over with --no-resume",
        )  # fmt: skip
    teller(progress)(f"goes on with {flags}, chosen when this run began")
    return kept


@contextmanager
def held(config: TrainConfig) -> Iterator[None]:
    """Has this process's device leave few gaps, and inside it refuse more than the budget, where there is one."""
    from qtool.system.devices import grow_in_place, limited_memory, resolve_device

    device = resolve_device(config.device)
    grow_in_place(device)
    with limited_memory(device, _budget(config)):
        yield


def _with_batch(config: TrainConfig, source: Source, looked: list[dict[str, Any]], progress: Progress) -> Choice:
    from qtool.memory.plan import largest_batch
    from qtool.steps.step import fewest_samples

    if source.parts is None:
        raise UsageError("--batch-size auto", "a data set", "batches made already", "pass the data set itself")
    free = SHARE * _free(config)
    limit = min(free, _budget(config) or free)
    assert source.model is not None
    least = fewest_samples(source.model)
    most = max(least * config.devices, len(source.parts.train) // STEPS_PER_EPOCH)  # type: ignore[arg-type]
    with _telling(Predictor(source), progress, config, 3 + most.bit_length(), looked) as predicted:
        size, peak = largest_batch(config, limit, predicted, most, least)
    why = f"the largest batch predicted to fit, of at most {most}, an eighth of an epoch"
    told = f"predicted peak {bytes_told(peak)} of {bytes_told(limit)}; at most {most} are taken"
    teller(progress)(f"batch size {size}: {told}")
    memory = {"predicted_peak_bytes": peak, "limit_bytes": int(limit), "why": why}
    return Choice(dataclasses.replace(config, batch_size=size), memory)


def _free(config: TrainConfig) -> float:
    """Free memory for each process."""
    from qtool.system.devices import memory_free, resolve_device

    device = resolve_device(config.device)
    sharing = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", config.devices))
    return memory_free(device) / sharing


def gives_way(config: TrainConfig) -> bool:
    """Whether micro-batches may be made smaller unasked: qtool was left to find their size, or to keep to a budget."""
    return config.batch_size == AUTO or (config.memory_budget is not None and "micro_batches" not in pinned(config))


def _within(begun: Choice, source: Source, looked: list[dict[str, Any]], progress: Progress) -> Choice:
    from qtool.memory.plan import choose, plans
    from qtool.steps.step import fewest_samples

    config = begun.config
    budget, predictor, legal = _budget(config), Predictor(source), _legal_for(source)
    assert budget is not None
    assert source.model is not None
    count = sum(1 for _ in plans(config, pinned(config), legal, lambda _: 1.0))
    with _telling(predictor, progress, config, count, looked) as peak:
        peak(config)
        seconds = predictor.seconds(config)
        found, smallest = choose(config, budget, peak, pinned=pinned(config), legal=legal, seconds=seconds)
        plan = found or _impossible(config, smallest, budget, peak, fewest_samples(source.model))
    if isinstance(plan, UsageError):
        raise plan
    times = f"its step estimated at {plan.time / seconds(config):.2g} times that without"
    why = f"the fastest choice predicted to fit ({times})" if plan.changes else "it fits as it is"
    told = f"with {plan.flags}, {why}" if plan.changes else "as it is"
    teller(progress)(
        f"{config.memory_budget} budget{_each(config)}: predicted peak {bytes_told(plan.peak_bytes)} {told}"
    )
    before = [begun.memory["why"]] if begun.memory else []
    memory = {"predicted_peak_bytes": plan.peak_bytes, "limit_bytes": int(budget), "why": "; ".join([*before, why])}
    return Choice(plan.config, memory)


@contextmanager
def _telling(
    peak: Callable[[TrainConfig], int],
    progress: Progress,
    base: TrainConfig,
    most: int,
    looked: list[dict[str, Any]],
) -> Iterator[Callable[[TrainConfig], int]]:
    """``peak``, which then tells before each prediction what it is of: what differs from ``base``, of ``most``.

    What was predicted is added to ``looked``, once: its flags and its peak, or None where the model does not take them.
    """
    from qtool.memory.plan import difference, flags

    counted = itertools.count(1)
    with meter(progress, "train") as report:

        @functools.cache
        def told(config: TrainConfig) -> int:
            differing, done = flags(difference(base, config)), next(counted)
            report(f"predicting {differing or 'it as it is'}", done, max(most, done + 1))
            found: int | None = None
            try:
                found = peak(config)
            finally:
                looked.append({"flags": differing, "predicted_peak_bytes": found})
            return found

        yield told


def _impossible(
    config: TrainConfig, smallest: Plan, budget: float, peak: Callable[[TrainConfig], int], least: int
) -> UsageError:
    """What to say of a budget that no plan fits. Each device has at least ``least`` samples."""
    need = f"{-(-smallest.peak_bytes // MIB)}MiB"
    others = _more_devices(config, smallest.config, budget, peak, least) + _adapters(smallest, peak)
    return UsageError(
        "--memory-budget", f"at least {need}{_each(config)}, the smallest predicted need", str(config.memory_budget),
        f"pass --memory-budget {need} {smallest.flags}".rstrip() + f", or {others}a smaller --batch-size",
    )  # fmt: skip


def _each(config: TrainConfig) -> str:
    return f" on each of {config.devices} devices" if config.devices > 1 else ""


def _more_devices(
    config: TrainConfig, smallest: TrainConfig, budget: float, peak: Callable[[TrainConfig], int], least: int
) -> str:
    """What to pass for enough devices, ending in "or ", where there is a number of them that is enough."""
    from qtool.memory.plan import difference, fewest_devices, flags, sharded

    smallest = dataclasses.replace(smallest, grad_clip=config.grad_clip)
    count = fewest_devices(smallest, budget, peak, _legal, least)
    if count is None:
        return ""
    return f"{flags(difference(config, sharded(smallest, count)))}, or "


def _adapters(smallest: Plan, peak: Callable[[TrainConfig], int]) -> str:
    """The flag of adapters, ending in "or ", where the model takes them and needs less with them."""
    wanted = dataclasses.replace(smallest.config, lora=8)
    try:
        less = smallest.config.lora is None and peak(wanted) < smallest.peak_bytes
    except QtoolError:  # it has no layers for them, or peft is not there
        return ""
    return "--lora 8, or " if less else ""


def _budget(config: TrainConfig) -> float | None:
    from qtool.memory.arithmetic import parse_bytes

    return None if config.memory_budget is None else parse_bytes(config.memory_budget, "option '--memory-budget'")


def pinned(config: TrainConfig) -> list[str]:
    """What the user has set: the fields that are not at their defaults, and those that are kept there."""
    plain = TrainConfig()
    changed = [f.name for f in dataclasses.fields(TrainConfig) if getattr(config, f.name) != getattr(plain, f.name)]
    return [*changed, *(config.keep or ())]


def _legal(config: TrainConfig) -> bool:
    from qtool.training import rules

    return not any(rule.broken(config) for rule in rules.RULES)


def _legal_for(source: Source) -> Callable[[TrainConfig], bool]:
    """Whether a config's options go together, and with the model."""
    from qtool.training.techniques import check

    def legal(config: TrainConfig) -> bool:
        assert source.model is not None
        try:
            check(source.model, config)
        except QtoolError:
            return False
        return True

    return legal


class Predictor:
    """The predicted peak, in bytes, of training ``source`` by a config; each is predicted once."""

    def __init__(self, source: Source) -> None:
        from qtool.memory.scratch import Scratch

        self._source, self._scratch = source, Scratch()
        self._known: dict[TrainConfig, Prediction] = {}

    def __call__(self, config: TrainConfig) -> int:
        return self._of(config).peak_bytes

    def seconds(self, base: TrainConfig) -> Callable[[TrainConfig], float]:
        """The estimated time of the step of a config that ``qtool.memory.plan`` makes of ``base``."""
        from qtool.memory.pace import measure, step_seconds
        from qtool.system.devices import resolve_device

        work, rates = self._of(base).work, measure(resolve_device(base.device), (base.precision, "bf16-mixed"))
        return lambda config: step_seconds(config, base, work, rates)

    def _of(self, config: TrainConfig) -> Prediction:
        from qtool.memory.predict import predict
        from qtool.nested import num_samples, tensors
        from qtool.steps.loop import task_loss
        from qtool.steps.order import largest_seen
        from qtool.training.techniques import setup

        if config in self._known:
            return self._known[config]
        source = self._source
        wanted, spared = _fewer_micro_batches(config) if source.parts else (config, 0)
        parts: dict[str, Any] = {"prepare": setup, "loss": task_loss(source.task), "scratch": self._scratch}
        batch, _ = largest_seen(source.parts and source.parts.train, source.data, wanted)
        if source.parts is None:
            wanted = dataclasses.replace(wanted, batch_size=num_samples(batch[0]))
        each = sum(t.nbytes for t in tensors(batch)) / num_samples(batch)
        assert source.model is not None
        found = predict(lambda: source.model, batch, wanted, **parts)  # type: ignore[arg-type, return-value]
        self._known[config] = dataclasses.replace(found, peak_bytes=found.peak_bytes + int(spared * each))
        return self._known[config]


def _fewer_micro_batches(config: TrainConfig) -> tuple[TrainConfig, int]:
    """Three micro-batches stand for more: gradients are there from the second on. Also how many samples that spares."""
    if config.micro_batches <= 3:
        return config, 0
    share = -(-config.batch_size // config.devices)
    kept = 3 * -(-share // config.micro_batches)
    return dataclasses.replace(config, batch_size=kept * config.devices, micro_batches=3), share - kept


def explained(
    error: OutOfMemory, asked: TrainConfig, config: TrainConfig, source: Source, progress: Progress
) -> QtoolError:
    """The end of a run for lack of memory, told with what was predicted and the next cheapest flags.

    ``config`` is what ``asked`` was fitted to. No more than ``EXPLAINED`` plans are predicted for it.
    """
    from qtool.memory.plan import choose
    from qtool.system.devices import out_of_memory

    def seconds_of(predictor: Predictor) -> Callable[[TrainConfig], float]:
        """Its own, or where a full device has no room to be measured, none: the plainest plans come first then."""
        try:
            return predictor.seconds(config)
        except Exception as lacking:
            if not out_of_memory(lacking):
                raise
            return lambda _: 1.0

    try:
        predictor, legal = Predictor(source), _legal_for(source)
        with _telling(predictor, progress, config, EXPLAINED, []) as peak:
            predicted = peak(config)
            plan, smallest = choose(
                config, 0.8 * predicted, peak, pinned=pinned(config), legal=legal, seconds=seconds_of(predictor),
                most=EXPLAINED - 1,
            )  # fmt: skip
    except Exception:  # nothing may hide that memory ran out, the prediction of it least of all
        return error
    each = f"{config.devices} times " if config.devices > 1 else ""
    got = f"{error.got} ({each}{bytes_told(predicted)} predicted for tensors)"
    return type(error)(
        error.where, error.expected, got, f"{_ways_out(asked, plan or smallest)}; {error.last}", error.last
    )


def on_host(config: TrainConfig) -> bool:
    """Whether what a training needs for its batches is host memory."""
    from qtool.system.devices import resolve_device

    return resolve_device(config.device).type == "cpu"


def memory_ended(
    error: Killed, folder: Path, config: TrainConfig, kills: Mapping[str, int], free: int | None
) -> OutOfMemory | None:
    """A kill told as the end of host memory, where the system has counted one since it had ``kills``; else None.

    ``free`` bytes were free then. None for a GPU's training too, whose micro-batches do not decide about host memory.
    """
    from qtool.steps.checkpoint import last_good, latest
    from qtool.system.devices import killed_since

    if error.by != signal.SIGKILL or not killed_since(kills) or not on_host(config):
        return None
    had = "" if free is None else f", {bytes_told(free)} free when it began"
    last = last_good(latest(folder / "checkpoints"))
    return OutOfMemory(error.where, "host memory for it", f"{error.got}, probably for lack of it{had}", last, last)


def _ways_out(asked: TrainConfig, best: Plan) -> str:
    """What to pass; where the batch was found by itself, and halved to the end, no smaller one."""
    cheaper = [f"pass {best.flags} (predicted {bytes_told(best.peak_bytes)})"] if best.changes else []
    if asked.batch_size == AUTO:
        return ", or ".join([*cheaper, "pass --strategy fsdp and more --devices", "take a smaller model"])
    return ", or ".join([*(cheaper or ["pass --batch-size auto"]), "a smaller --batch-size"])
