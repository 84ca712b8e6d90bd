"""One optimizer step, from a batch to an update.

The step is the textbook one::

    for each micro-batch:  loss = sum of losses / number of samples (or tokens) in the whole batch
                           scale(loss).backward()
    unscale, clip, optimizer.step(), update the scale

Its parts, and what each technique changes of them, are in a Setup (``qtool.steps.setup``).

Averaging. A loss function returns (sum, weight): the sum over samples or tokens, and their number. The
mean over a batch in micro-batches is Σ sums / Σ weights, and not the mean of the micro-batches' means,
which is wrong as soon as they differ in size. Σ weights is known only after the last micro-batch, so the
backward passes divide by a guess (the first micro-batch's weight per sample, times the samples), and the
gradients are corrected by guess / Σ weights at the end; for a loss that counts samples the two are equal.
A micro-batch's batch-norm statistics are its own: with batch-norm, accumulation is not the large batch.

Several processes (``qtool.system.processes``) each take their share of the batch. Gradients come out of the
backward pass averaged over the processes, and so each divides its sum by Σ weights / processes, with the
sum over all of them. All make the same number of passes, since they exchange parameters or gradients in
each: one whose samples have run out repeats one of them, and multiplies its loss by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from qtool.nested import num_samples, split
from qtool.recipe import TrainConfig
from qtool.steps.passes import backward_told
from qtool.steps.setup import LossFunction, Setup
from qtool.system import processes


def micro_size(config: TrainConfig, halvings: int = 0, batch_size: int | None = None) -> int:
    """Samples of a process's micro-batch, that many times halved; of batches of another size than the config's."""
    size = math.ceil(math.ceil((batch_size or config.batch_size) / processes.size()) / config.micro_batches)
    return -(-size // (1 << halvings))


def fewest_samples(model: nn.Module) -> int:
    """How many a micro-batch that nobody asked for has at least: batch-norm may not train on one value per channel."""
    return 2 if any(map(_is_batch_norm, model.modules())) else 1


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether it is a batch-norm, or a captured graph with one in it."""
    if isinstance(module, GraphModule):
        return any(node.target is torch.ops.aten.batch_norm.default for node in module.graph.nodes)
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """The rate of ``step`` (0 … total-1): a linear warm-up, then constant or half a cosine down to zero.

    Step s of w warm-up steps has (s+1)/w of the peak; of the n-w steps after them, step k has
    (1 + cos(πk/(n-w)))/2 of it (arXiv 1608.03983, without restarts).
    """
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class NotFinite(Exception):
    """The loss of a step, ``value``, was NaN or infinite. ``forward`` repeats the forward pass that made it."""

    def __init__(self, value: float, forward: Callable[[], Any]) -> None:
        super().__init__(f"loss {value}")
        self.value, self.forward = value, forward


@dataclass(frozen=True)
class Part:
    """A micro-batch; one that does not count stands in for samples that this process does not have."""

    value: Any
    target: Any
    counts: bool = True

    @property
    def samples(self) -> int:
        return num_samples(self.value) if self.counts else 0


class Step:
    """Makes optimizer steps: ``Step(setup, optimizer, loss)(input, target)`` returns the batch's mean loss."""

    def __init__(self, setup: Setup, optimizer: Optimizer, loss: LossFunction) -> None:
        self.setup, self.optimizer, self.loss = setup, optimizer, loss
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.micro_size = micro_size(setup.config)
        self.fewest = fewest_samples(setup.model)
        self.skips: Tensor | int = 0
        self.updating = False
        """Whether parameters may have changed in the step that is being made."""

    @property
    def skipped(self) -> int:
        """Steps that the gradient scaler has skipped. To read it waits for a GPU."""
        return int(self.skips)

    def halve(self) -> bool:
        """Makes micro-batches half as large, from the next step on; False where they are as small as they can be."""
        if self.setup.updates_in_backward:
            return False
        before = self.micro_size
        self.micro_size = min(before, max(self.fewest, math.ceil(before / 2)))
        return self.micro_size < before

    def __call__(self, value: Any, target: Any, rate: float, total: int | None = None) -> float:
        """One step at learning rate ``rate``. Raises NotFinite, with the parameters untouched, for such a loss.

        ``total`` is the batch's size over all processes, where ``value`` is this one's share of it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self._parts(value, target, num_samples(value) if total is None else total)
        self.updating = self.setup.updates_in_backward
        mean = self._backward(parts)()
        self._require_finite(mean, parts)
        self.updating = True
        self._update()
        return mean

    def _parts(self, value: Any, target: Any, total: int) -> list[Part]:
        """The micro-batches: as many as the process with the largest share has.

        One of a single sample, which batch-norm may not take, is made only where that is the size of all. Where updates
        are made in the backward pass the batch is whole, also the one that a left-over sample has joined.
        """
        if self.setup.updates_in_backward:
            return [Part(value, target)]
        share = processes.share(total)
        wanted = self._num_parts(share.largest)
        count = min(wanted, max(1, share.count))
        parts = [Part(x, y, share.count > 0) for x, y in split((value, target), count)]
        return parts + [replace(parts[0], counts=False)] * (wanted - count)

    def _num_parts(self, largest: int) -> int:
        """The micro-batches of each process in a batch of which none has more than ``largest`` samples."""
        least = min(self.fewest, self.micro_size)
        return min(math.ceil(largest / self.micro_size), max(1, largest // least))

    def smallest(self, total: int) -> int:
        """The samples of the smallest micro-batch that any process makes of a batch of ``total``."""
        least = max(1, total // processes.size())
        if self.setup.updates_in_backward:
            return least
        return least // min(self._num_parts(-(-total // processes.size())), least)

    def _forward(self, part: Part) -> tuple[Tensor, Tensor | float]:
        setup = self.setup
        with setup.forward():
            given = setup.place(part.value), setup.move(part.target)
            loss, weight = setup.replica(self.loss, *given) if setup.replica else self.loss(setup.model, *given)
        return (loss, weight) if part.counts else (loss * 0.0, weight * 0)  # of one dtype in all processes

    def _losses(self, parts: list[Part]) -> list[Any]:
        return [self._forward(part) for part in parts]

    def _backward(self, parts: list[Part]) -> Callable[[], float]:
        """Leaves the batch's gradients in the parameters; what it returns reads the mean loss."""
        self.optimizer.zero_grad()
        sums: list[Tensor] = []
        weights: list[Tensor | float] = []
        guess: Tensor | float = 1.0
        for part in parts:
            last = len(sums) + 1 == len(parts)
            with nullcontext() if last else self.setup.accumulating():
                loss, weight = self._forward(part)
                if not sums:
                    guess = _guess(weight, parts)
                sums.append(loss.detach())
                weights.append(weight)
                scaled = self.setup.scaler.scale(loss / guess)
                del loss
                if last:
                    alone = len(parts) == 1 and processes.size() == 1  # then the guess was none
                    whole = guess if alone else _at_least(processes.total(sum(weights)), 1.0)
                    reading = _reader((sums[0] if alone else processes.total(sum(sums))) / whole)
                    if self.setup.updates_in_backward:
                        self._require_finite(reading(), parts)
                # in this thread: autograd's own would have a second workspace of cuBLAS, 32 MiB on an H100
                with torch.autograd.set_multithreading_enabled(False), backward_told():
                    scaled.backward()  # type: ignore[no-untyped-call]
        if len(parts) > 1:
            self._correct(guess / (whole / processes.size()))
        return reading

    def _require_finite(self, mean: float, parts: list[Part]) -> None:
        if not math.isfinite(mean):
            raise NotFinite(mean, lambda: self._losses(parts))

    def _correct(self, factor: Tensor | float) -> None:
        if isinstance(factor, Tensor) or factor != 1.0:
            grads = [processes.local(p.grad) for p in self.parameters if p.grad is not None]
            if isinstance(factor, Tensor) and grads:
                factor = factor.to(grads[0].device)  # which are in host memory where weights are offloaded
            torch._foreach_mul_(grads, factor)

    def _update(self) -> None:
        scaler, clip = self.setup.scaler, self.setup.config.grad_clip
        scale = scaler._scale.clone() if scaler.is_enabled() else None  # type: ignore[union-attr]
        if clip is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, clip)
        scaler.step(self.optimizer)
        scaler.update()
        if scale is not None:  # compared where it is: to ask for its value would wait for the step
            self.skips = self.skips + (scaler._scale < scale)  # type: ignore[operator]


def _at_least(weight: Tensor | float, low: float) -> Tensor | float:
    """``weight``, and ``low`` where it is zero: a batch without a single counted token has a loss of zero."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, low)
    return weight if weight > 0 else low


def _guess(weight: Tensor | float, parts: list[Part]) -> Tensor | float:
    """A process's mean weight in this batch, as the first micro-batches make it seem; of a single one it is exact."""
    weight, count = processes.total(weight), processes.size()
    if len(parts) == 1:
        return _at_least(weight, 1.0) / count if count > 1 else _at_least(weight, 1.0)
    first, samples = processes.total(parts[0].samples), processes.total(sum(part.samples for part in parts))
    guess: Tensor | float = _at_least(weight, float(first)) / first * samples / count
    return guess


def _reader(mean: Any) -> Callable[[], float]:
    """Reads ``mean`` later, without waiting for a GPU's backward pass, which is queued after this call."""
    if not isinstance(mean, Tensor):
        return lambda: float(mean)
    if mean.device.type != "cuda":
        return mean.item
    host = torch.empty((), dtype=torch.float32, pin_memory=True)
    host.copy_(mean.reshape(()), non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> float:
        done.synchronize()
        return host.item()

    return read
