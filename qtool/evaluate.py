"""Evaluation: a model against targets, and one model against another.

``compare`` is what a quantized model is judged by. With reference logits r and other logits o of the same N samples:

* agreement: share of samples with the same argmax.
* kl: mean over samples of KL(p‖q) = Σ p (ln p − ln q), p = softmax(r), q = softmax(o), in nats. A class that r gives
  no chance (−∞, a masked one) adds nothing, whatever o makes of it; one that o alone rules out makes it infinite.
* sqnr_db: 10 log10(Σ r² / Σ (r − o)²), over all logits; infinite where they are equal. What is infinite in both counts
  neither as signal nor as noise.
* top1_drop: top-1 of the reference less top-1 of the other, as a share. Only samples that one gets right and the other
  wrong move it, so its interval is that of *paired* proportions (:mod:`qtool.intervals`).

Which axis of an output counts classes is :func:`class_axis`'s to say, for everything here that asks: logits of tokens
(N×T×C) and of pixels (N×C×H×W) are many rows of one sample, and what is beside a target that is ignored counts nothing.
Positions of one sample are alike, so their intervals are over samples, of what each adds to the drop.

Several processes (``qtool.system.processes``) each evaluate their share of a data set; the sums are of all.

Everything is summed in float64. Left out on purpose: the bootstrap, which says the same here and needs a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qtool.data.labels import IGNORED
from qtool.data.specs import batches
from qtool.errors import QtoolError
from qtool.intervals import mean_interval, paired_interval
from qtool.nested import tensors
from qtool.system import processes
from qtool.tasks import Task, finished, is_undefined, judging, loss_of, metrics_of, weight_of
from qtool.units import many

Predict = Callable[[Any], Any]
PIECE = 64
"""Samples that are compared in float64 at once."""


@torch.no_grad()
def evaluate(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> dict[str, float]:
    """Means of ``loss`` and of the task's metrics over all batches of all processes, and ``num_samples`` weighed.

    Streams: nothing grows with the number of batches. Raises QtoolError where there is no batch.
    """
    return _means(processes.gather(_added(predict, batches, task).values), task)


@torch.no_grad()
def metrics_in(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> set[str] | None:
    """The names of the metrics that :func:`evaluate` gives of such batches; the values of a few mean nothing.

    None where nothing in them is weighed, or the task's ``finish`` cannot compute with them, as it may with all.
    """
    sums = _added(predict, batches, task)
    if not sums.values[0]:
        return None
    try:
        return sums.means().keys() - {"num_samples"}
    except QtoolError as error:
        if is_undefined(error):
            return None
        raise


class Sums:
    """The sums of the loss and of a task's metrics over batches of one process, added up as these come."""

    def __init__(self, task: Task) -> None:
        self._task = judging(task)
        self._weight = 0.0
        self._sums: dict[str, Any] = {}

    @torch.no_grad()
    def add(self, output: Any, target: Any) -> None:
        """Adds what a model gave for a batch. Raises QtoolError where the task does."""
        loss, count = loss_of(self._task, output, target)
        found = {"loss": loss, **metrics_of(self._task, output, target)}
        self._weight += weight_of(self._task, count)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)

    @property
    def values(self) -> tuple[float, dict[str, float]]:
        """The weight of the batches, and the sums."""
        return self._weight, {name: float(value) for name, value in self._sums.items()}

    def means(self) -> dict[str, float]:
        """What :func:`evaluate` gives of these batches alone. Raises QtoolError where nothing was added."""
        return _means([self.values], self._task)


def _added(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> Sums:
    sums = Sums(task)
    for inputs, target in batches:
        sums.add(predict(inputs), target)
    return sums


def _means(gathered: Sequence[tuple[float, dict[str, float]]], task: Task) -> dict[str, float]:
    """The metrics over what all processes added."""
    weight = sum(part for part, _ in gathered)
    names = dict.fromkeys(name for _, part in gathered for name in part)
    if not weight:
        if not names:
            raise QtoolError("evaluation", "at least one sample", "none", "pass data with samples in it")
        do = "pass data with targets that count, or correct the weight that the task gives"
        raise QtoolError("evaluation", "at least one sample that counts", f"none by the task '{task.name}'", do)
    means = {name: sum(part.get(name, 0.0) for _, part in gathered) / weight for name in names}
    return {"num_samples": weight, **finished(task, means)}


def shared_batches(dataset: Any, batch_size: int, predict: Predict) -> Iterator[tuple[Any, Any]]:
    """The batches of this process's share of ``dataset``, for :func:`evaluate`.

    Where another process has one more, ``predict`` is called on a sample in its place and the output dropped: processes
    that hold parts of one model run it together or not at all.
    """
    share = processes.share(len(dataset))
    yield from batches(dataset, batch_size, order=range(share.start, share.stop))
    for _ in range(math.ceil(share.count / batch_size), math.ceil(share.largest / batch_size)):
        predict(next(batches(dataset, 1, order=[0]))[0])


def class_axis(output: Tensor, targets: Any = None, *, asked: bool = False) -> int | None:
    """The axis of ``output`` that counts classes; None for what is no logits.

    N×C are logits. Of more axes the last is taken (N×T×C, tokens), or the second (N×C×H×W, pixels), where ``targets``
    are class indices that have all the others; without such targets only where it is ``asked`` for, as a contract does:
    then pixels are what has four axes and more. The first axis is not compared. Where ``targets`` are a number for each
    of the output's (a regression, several labels at once), which share of a sum they are is nobody's question. Nor is
    it where they are other numbers (a mean and its spread are learned from one), or several targets (one for each head)
    of which none is classes of this output, unless it is ``asked`` for.
    """
    if several := [] if isinstance(targets, Tensor | list) else list(tensors(targets)):  # a list is of samples
        told = next((axis for each in several if (axis := _told_axis(output, each)) is not None), None)
        return class_axis(output, asked=True) if told is None and asked else told
    if not output.is_floating_point() or output.dim() < 2 or _are_numbers(targets, output):
        return None
    last, behind = output.dim() - 1, tuple(output.shape[1:])
    told = isinstance(targets, Tensor) and not targets.is_floating_point()
    fits = [axis for axis in (last, 1) if told and tuple(targets.shape[1:]) == behind[: axis - 1] + behind[axis:]]
    numbers = isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape != output.shape
    guess = [1] if (last == 1 and not numbers) or (asked and last != 2) else [2] if asked else []
    axis = next(iter(fits if last > 1 and fits else guess), None)
    return axis if axis is not None and output.shape[axis] > 1 else None


def _told_axis(output: Tensor, target: Tensor) -> int | None:
    """The axis that counts classes where ``target`` is class indices of ``output``, or shares of its classes."""
    axis = class_axis(output, target)
    told = axis is not None and (target.shape == output.shape or are_classes(target, output, axis))
    return axis if told else None


def _are_numbers(targets: Any, output: Tensor) -> bool:
    """Whether there is a target for each number of ``output``, and they are no shares of classes."""
    if not isinstance(targets, Tensor) or targets.shape != output.shape:
        return False
    shares = any(bool(((targets.sum(axis) - 1).abs() < 1e-3).all()) for axis in {1, output.dim() - 1})
    return not (shares and bool((targets >= 0).all()))


def counted(targets: Any, output: Tensor, axis: int) -> Tensor | None:
    """Which positions of each sample have a target (bool, ``output`` without ``axis``); None where all have."""
    return (targets != IGNORED).cpu() if are_classes(targets, output, axis) else None


def are_classes(targets: Any, output: Tensor, axis: int) -> bool:
    """Whether ``targets`` are class indices, one for each position of ``output`` beside ``axis``, which counts them."""
    told = isinstance(targets, Tensor) and not targets.is_floating_point()
    return told and targets.shape == output.shape[:axis] + output.shape[axis + 1 :]


def compare(
    reference: Tensor, other: Tensor, targets: Tensor | None = None, *, axis: int | None = None
) -> dict[str, Any]:
    """How far ``other`` is from ``reference``, two N×C logit tensors of the same samples; with N targets if known.

    Logits of several positions in each sample, with a target for each, are compared position by position, those
    without a target left out; ``axis`` counts the classes (by default as :func:`class_axis` says).

    Returns ``num_samples``, ``agreement``, ``kl`` (nats), ``sqnr_db`` and, with targets, ``top1``, ``top1_reference``,
    ``top1_drop`` (shares) and ``top1_drop_ci95`` (low, high); the module says how each is defined. Raises QtoolError
    where shapes differ or a logit is not finite.
    """
    if reference.shape != other.shape:
        got = f"{tuple(reference.shape)} and {tuple(other.shape)}"
        raise QtoolError("comparison", "outputs of the same shape", got, "compare the same samples and classes")
    axis = class_axis(reference, targets, asked=True) if axis is None else axis
    _check(reference, other, axis)
    assert axis is not None
    keep, wanted = counted(targets, reference, axis), (None if targets is None else targets.cpu())
    parts = [
        _part(reference[i : i + PIECE], other[i : i + PIECE], axis, *(_piece(t, i) for t in (wanted, keep)))
        for i in range(0, len(reference), PIECE)
    ]
    sums = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    total = float(sums["count"].sum())
    if not total:
        raise QtoolError("comparison", "a target that counts", "ignored ones alone", "give data with targets")
    result: dict[str, Any] = {
        "num_samples": int(total),
        **{name: float(sums[name].sum()) / total for name in ("agreement", "kl")},
        "sqnr_db": ratio_db(float(sums["signal"].sum()), float(sums["noise"].sum())),
    }
    return result if targets is None else result | _drop(sums, total, alone=reference.dim() == 2)


def _piece(tensor: Tensor | None, start: int) -> Tensor | None:
    return None if tensor is None else tensor[start : start + PIECE]


def _part(
    reference: Tensor, other: Tensor, axis: int, targets: Tensor | None, keep: Tensor | None
) -> dict[str, Tensor]:
    """For each of a few samples (float64): its positions that count, and its sums over them."""
    reference, other = reference.movedim(axis, -1).double(), other.movedim(axis, -1).double()
    one, two = reference.argmax(-1), other.argmax(-1)
    weights = torch.ones_like(one, dtype=torch.float64) if keep is None else keep.double()
    both = weights[..., None]
    rows = {
        "count": weights, "agreement": weights * (one == two), "kl": _weighed(weights, divergence(reference, other)),
        "signal": both * signal_of(reference).square(), "noise": both * error_of(reference, other).square(),
    }  # fmt: skip
    if targets is not None:
        right, as_right = one == targets, two == targets
        rows |= {
            "right": weights * as_right, "right_reference": weights * right,
            "only_reference": weights * (right & ~as_right), "only_other": weights * (as_right & ~right),
        }  # fmt: skip
    return {name: values.flatten(1).sum(1) if values.dim() > 1 else values for name, values in rows.items()}


def _weighed(weights: Tensor, values: Tensor) -> Tensor:
    """Values where they count, whatever they are where they do not."""
    return torch.where(weights > 0, values, 0.0)


def _check(reference: Tensor, other: Tensor, axis: int | None) -> None:
    """Raises QtoolError for what is no logits, and for what is not finite but for classes masked in both."""
    if axis is None or not len(reference):
        got = str(tuple(reference.shape))
        raise QtoolError("reference outputs", "N×C logits, N at least 1", got, "pass logits")
    for name, outputs in (("reference", reference), ("other", other)):
        bad = unlike(reference, outputs).flatten(1).any(1).nonzero()
        if len(bad):
            raise QtoolError(
                f"{name} outputs", "finite logits",
                f"NaN or infinity in {many(len(bad), 'sample')}, the first {int(bad[0])}",
                "inspect the model's weights and inputs",
            )  # fmt: skip


def unlike(reference: Tensor, other: Tensor) -> Tensor:
    """Where ``other`` is NaN or infinite, but for −∞ where the reference is −∞ as well: a masked class."""
    return ~(other.isfinite() | (other.isneginf() & reference.isneginf()))


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(reference) ‖ softmax(other)) over the last axis, in nats, of the tensors' type."""
    log_p, log_q = reference.log_softmax(-1), other.log_softmax(-1)
    p = log_p.exp()
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(-1)


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10(Σ reference² / Σ (reference − other)²) in dB, in float64.

    Infinite where the two are equal, −infinite where only the reference is all zero.
    """
    reference, other = reference.double(), other.double()
    return ratio_db(signal_of(reference).square().sum().item(), error_of(reference, other).square().sum().item())


def signal_of(reference: Tensor) -> Tensor:
    """A reference with zeros where it is infinite."""
    return torch.where(reference.isinf(), 0.0, reference)


def error_of(reference: Tensor, other: Tensor) -> Tensor:
    """The difference, which is zero where both are the same infinity."""
    return torch.where(reference == other, 0.0, reference - other)


def ratio_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two energies; infinite without noise, −infinite without a signal or bound."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf


def _drop(sums: dict[str, Tensor], total: float, *, alone: bool) -> dict[str, Any]:
    """Top-1 of both, its drop and the drop's 95 % interval; ``alone`` where a sample is one position."""
    only_reference, only_other = int(sums["only_reference"].sum()), int(sums["only_other"].sum())
    drop = (only_reference - only_other) / total
    interval = paired_interval(only_reference, only_other, int(total))
    return {
        "top1": float(sums["right"].sum()) / total,
        "top1_reference": float(sums["right_reference"].sum()) / total,
        "top1_drop": drop,
        "top1_drop_ci95": interval if alone else _over_samples(sums, drop),
    }


def _over_samples(sums: dict[str, Tensor], drop: float) -> tuple[float, float]:
    """The interval of a drop that is the mean of positions: by what each sample adds to it, beyond its share."""
    weights = sums["count"]
    residual = (sums["only_reference"] - sums["only_other"] - drop * weights) / weights.mean()
    low, high = mean_interval(residual)  # its mean is zero
    return max(-1.0, drop + low), min(1.0, drop + high)
