"""The peak of a training step, measured: a few real steps, with every allocation counted.

On the CPU torch's profiler reports each block that torch's allocator hands out and takes back, to the
byte; the peak of their running sum is the measured one. It does not see what kernels ask of the system
themselves (oneDNN's scratch space), nor the interpreter; the resident set, which does, is shown beside it.
On a GPU the caching allocator counts: bytes allocated, which compare with the prediction, and bytes
reserved, which is what the process holds.

The counting begins before the model is made, so it belongs in a fresh process, where nothing else is. As one of
several processes it takes its share of the batch, and counts for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from qtool.errors import QtoolError
from qtool.nested import cut, map_tensors, num_samples
from qtool.recipe import TrainConfig
from qtool.steps.nonfinite import loss_told, remedy
from qtool.steps.setup import LossFunction, Setup, trained
from qtool.steps.step import NotFinite, Step
from qtool.system import processes
from qtool.system.devices import current, grow_in_place, memory_used, resolve_device
from qtool.system.quiet import quiet_profiler

Prepare = Callable[[nn.Module, TrainConfig, Any], Setup]
SKIPPED = 20
"""Of steps that the gradient scaler skips, as it does the first ones now and then, so many are made up for: they make
no optimizer states, and take less time."""


@dataclass(frozen=True)
class Measurement:
    """The measured peak in bytes: tensors allocated, and what the process holds for them."""

    peak_bytes: int
    held_bytes: int
    device: str
    steps: int
    seconds_per_step: float


def measure(
    build: Callable[[], nn.Module],
    batch: tuple[Any, Any],
    config: TrainConfig,
    *,
    prepare: Prepare,
    loss: LossFunction,
    steps: int = 3,
) -> Measurement:
    """Takes ``steps`` real steps on ``batch`` (input, target) and returns the peak of what they allocated.

    Those that the gradient scaler skips are not counted. The shortest of the others is the time of a step, with the
    batch at hand: reading data is no part of it.

    ``build`` makes the model, within the count. ``held_bytes`` is the growth of the resident set on the CPU, the
    reserved bytes on a GPU. Raises what the steps raise, and QtoolError where a loss is not finite.
    """
    device = resolve_device(config.device)
    grow_in_place(device)
    count = _on_gpu if device.type == "cuda" else _on_cpu
    seconds: list[float] = []
    # what closing a setup does, weights in 16 bits made float32 again, is no part of a step
    with current(device), ExitStack() as setups:

        def run() -> int:
            return _run(build, batch, config, prepare, loss, steps, seconds, setups)

        peak, held = count(run, device)
    return Measurement(peak, held, str(device), len(seconds), min(seconds))


def _run(
    build: Callable[[], nn.Module],
    batch: tuple[Any, Any],
    config: TrainConfig,
    prepare: Prepare,
    loss: LossFunction,
    steps: int,
    seconds: list[float],
    setups: ExitStack,
) -> int:
    """Takes the steps; the resident or reserved memory after them, while everything is still there."""
    total = num_samples(batch[0])
    mine = processes.share(total)
    value, target = map_tensors(torch.clone, cut(tuple(batch), mine.start, mine.stop, total))
    first = map_tensors(lambda t: t[:2] if t.dim() else t, value)
    setup = setups.enter_context(prepare(build().train(), config, first))
    optimizer = setup.make_optimizer(trained(setup.model))
    step = Step(setup, optimizer, loss)
    while len(seconds) < steps + min(step.skipped, SKIPPED):
        _wait(setup.device)
        start = time.perf_counter()
        try:
            step(value, target, config.learning_rate, total)
        except NotFinite as error:
            got = loss_told(setup.model, error.value, config.learning_rate, error.forward)
            do = remedy(got, config.precision, stepped=bool(seconds))
            raise QtoolError(f"measured step {len(seconds) + 1}", "a finite loss", got, do) from error
        _wait(setup.device)
        seconds.append(time.perf_counter() - start)
    del seconds[: min(step.skipped, len(seconds) - 1)]
    return _held(setup.device)


def _wait(device: torch.device) -> None:
    """Returns when a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _held(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else memory_used(device)


def _on_cpu(run: Callable[[], int], device: torch.device) -> tuple[int, int]:
    before = memory_used(device)
    changes, held = allocations(run)
    return highest_sum(changes), max(0, held - before)


def allocations(run: Callable[[], Any]) -> tuple[list[int], Any]:
    """What torch's CPU allocator handed out (+) and took back (−), bytes in order; and what ``run`` returned."""
    # torch.profiler's would sort all events, and import the compiler
    with quiet_profiler(), profile(profile_memory=True) as profiler:
        returned = run()
    assert profiler.kineto_results is not None
    events = profiler.kineto_results.events()  # a GPU's blocks are among them
    blocks = (e for e in events if e.name() == "[memory]" and e.device_type() != DeviceType.CUDA)
    changes = [(e.start_ns(), e.nbytes()) for e in blocks]
    return [change for _, change in sorted(changes, key=lambda item: item[0])], returned


def _on_gpu(run: Callable[[], int], device: torch.device) -> tuple[int, int]:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before, torch.cuda.max_memory_reserved(device)


def highest_sum(changes: Iterable[int]) -> int:
    """The highest running sum of ``changes``, at least 0.

    >>> highest_sum([3, 4, -7, 5])
    7
    """
    total = highest = 0
    for change in changes:
        total += change
        highest = max(highest, total)
    return highest
