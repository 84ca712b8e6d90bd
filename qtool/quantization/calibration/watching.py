"""Watching: how the network's outputs depend on the values that a range may clip.

After the calibration pass up to ``SAMPLES`` of the samples go through the prepared graph once more, one by one and with
gradients. Each observer gets its value x and g, the gradient by x of the outputs times random signs, and adds to its
histogram's ``Tails`` what ``ranges/network.py`` reads. One sample at a time is all the memory that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.nested import call, micro_batches, thinned
from qtool.quantization.algorithms.subject import Report, silent
from qtool.quantization.calibration.observers import RangeObserver
from qtool.quantization.outputs import rates, tapped, vector
from qtool.quantization.prepared import Prepared
from qtool.quantization.ranges.histogram import subsample
from qtool.quantization.ranges.network import beyond
from qtool.quantization.ranges.tails import BINS, Tails

SAMPLES = 128


class Watch:
    """Hears from observers while a sample goes through a graph, and what their values' gradients are afterwards."""

    def __init__(self, observers: Iterable[RangeObserver]) -> None:
        self.observers, self.tails = tuple(observers), dict[RangeObserver, Tails]()
        for observer in self.observers:
            if observer.fixed is None:
                self.tails[observer] = beyond(observer.histogram, observer.options)
        self.values: list[tuple[RangeObserver, Tensor]] = []

    def __enter__(self) -> Watch:
        for observer in self.observers:
            observer.enabled, observer.watch = False, self if observer in self.tails else None
        return self

    def __exit__(self, *_: object) -> None:
        for observer in self.observers:
            observer.enabled, observer.watch = True, None

    def see(self, observer: RangeObserver, x: Tensor) -> Tensor:
        """Remembers ``x``, which takes part in gradients from here on, unless it is empty."""
        if not x.numel():  # what a mask by which tokens are shared out left of a sample
            return x
        value, passed = tapped(x)
        self.values.append((observer, value))
        return passed

    def record(self, total: Tensor) -> None:
        """Adds a sample: the gradients of ``total`` by all that was seen on the way to it."""
        gradients = torch.autograd.grad(total, [value for _, value in self.values], allow_unused=True)
        found = {observer: (np.zeros(2 * BINS), 0.0) for observer in self.tails}
        for (observer, value), gradient in zip(self.values, gradients, strict=True):
            if gradient is not None:
                sums, energy = _tail_sums(value.detach(), gradient, self.tails[observer])
                found[observer] = found[observer][0] + sums, found[observer][1] + energy
        for observer, (sums, energy) in found.items():
            self.tails[observer].rows.append(sums)
            self.tails[observer].energy.append(energy)
        self.values.clear()

    def store(self) -> None:
        """Gives each histogram its tails, but for those whose gradients are not finite."""
        for observer, tails in self.tails.items():
            finite = np.isfinite(tails.energy).all() and all(np.isfinite(row).all() for row in tails.rows)
            observer.histogram.tails = tails if finite else None


def _tail_sums(x: Tensor, gradient: Tensor, tails: Tails) -> tuple[Any, float]:
    """The sums of ``gradient`` by the bins of the tails, and that of its squares where ``x`` is not zero.

    The latter is read from the values that a histogram counts, each of which stands for others; the former from all.
    """
    low, high = (float(end) for end in torch.aminmax(x))
    sums = torch.zeros(2 * BINS, dtype=torch.float64, device=x.device)
    for side, (reached, end) in enumerate(((low < tails.low, tails.low), (high > tails.high, tails.high))):
        if reached:  # by few samples: most are done with their extremes
            beyond = (x > end) if side else (x < end)
            edges = torch.from_numpy(tails.edges[side, 1:-1]).to(x.device, torch.float32)
            bins = torch.bucketize(x[beyond], edges, right=True) + side * BINS
            sums.index_add_(0, bins, gradient[beyond].double())
    (values, stride), (slopes, _) = subsample(x[None]), subsample(gradient[None])
    energy = torch.where(values == 0, 0.0, slopes).square().sum() * stride
    return sums.cpu().numpy(), float(energy)


@torch.enable_grad()
def watch(prepared: Prepared, batches: Iterable[Any], report: Report = silent) -> str | None:
    """Gives the observers' histograms their tails; returns why not where the outputs have no gradients."""
    signs, scales = torch.Generator().manual_seed(0), list[Tensor]()
    pieces = [piece for batch in thinned(batches, SAMPLES) for piece in micro_batches(batch, 1)]
    with Watch(prepared.observers.values()) as watching:
        for index, piece in enumerate(pieces if watching.tails else ()):
            report("ranges", index, len(pieces))
            outputs = call(prepared.graph, piece)
            scales = scales or [rate.detach() for rate in rates(outputs)]
            if not scales:
                return "the model gives no floating point numbers"
            found = vector(outputs, scales)
            draw = torch.rand(found.shape, generator=signs) < 0.5
            try:
                watching.record(torch.where(draw.to(found.device), found, -found).sum())
            except RuntimeError as error:
                if not _has_no_gradient(error):
                    raise
                return str(error).splitlines()[0]
        watching.store()
    return None


def _has_no_gradient(error: RuntimeError) -> bool:
    """Whether an operator without a derivative is the reason, which torch tells in two ways, and not lack of memory."""
    return isinstance(error, NotImplementedError) or any(
        word in str(error) for word in ("derivative", "autograd formula", "does not require grad")
    )
