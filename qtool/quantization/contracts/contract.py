"""The contract: how much accuracy may be lost, and whether a quantized model keeps to it, beyond noise.

Every candidate answers the same validation samples as the float model, so what is compared is paired: samples that both
get right say nothing about the difference. A criterion is *met* when the whole 95 % interval lies on the right side of
its limit, so that a lucky draw is not taken for a kept promise, *broken* when the whole interval lies on the wrong
side, and otherwise there are too few samples to tell, and it is said how many would do.

=============  ==============================================  =====================================================
criterion      value                                           interval
=============  ==============================================  =====================================================
max_drop       metric of the float model less the candidate's  that of a paired change (``paired.py``)
max_kl         mean KL(float ‖ candidate) in nats              Student's t, corrected for skewness (Hall), as for every
                                                               mean
min_agreement  share of samples with the same argmax           Wilson's for a proportion
=============  ==============================================  =====================================================

A sample of a language model is a sequence, one of a segmentation an image: its KL and its agreement are the means over
its tokens or pixels, those without a target left out. Those of one sample are alike, so the intervals are over samples,
as if each agreed whole or not at all: no mean of shares between 0 and 1 varies more.

Two candidates are compared in the same way, by the mean of their paired differences in divergence (KL for logits, the
squared error otherwise), which is far less noisy than a count of right answers. Left out on purpose: a correction
for looking at many candidates; the search says how many there were (``search.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qtool import evaluate
from qtool.errors import QtoolError, UsageError, nearest
from qtool.evaluate import class_axis, counted, divergence, error_of, unlike
from qtool.intervals import Z95, enough, mean_interval, wilson_interval
from qtool.nested import map_tensors, num_samples, per_sample, tensors
from qtool.paired import Interval, Paired, Sums, is_alike, joined, sums_of
from qtool.recipe import QuantizeConfig
from qtool.tasks import Task, is_higher_better
from qtool.units import figure

LEAST = 2
"""Samples without which nothing can be said of how much they differ."""
KEPT = 2**28
"""Bytes of float outputs that are held in memory; what is beyond them is computed anew for every candidate."""
Batches = Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Criterion:
    """One promise and what was found. ``met`` is None where the samples are too few to tell; ``needed`` says how many
    would tell if the true value were the one measured (None where it is beyond the limit). Drops are in points,
    agreement in percent, KL in nats."""

    name: str
    limit: float
    value: float
    ci95: tuple[float, float]
    met: bool | None
    needed: int | None = None

    @property
    def excess(self) -> float:
        """How far the value is beyond its limit, relative to the limit; negative within it."""
        sign = -1.0 if self.name == "agreement" else 1.0
        excess = sign * (self.value - self.limit) / (self.limit or 1.0)
        return math.inf if math.isnan(excess) else excess

    def met_with(self, noise: float) -> bool:
        """Whether it would be met, as far as can be told, if the error's power were ``noise`` times what it is.

        Divergence goes with the power; how many answers change, and what a metric loses by it, with the deviation.
        """
        if self.name == "agreement":
            return (100 - self.ci95[0]) * math.sqrt(noise) <= 100 - self.limit
        return self.ci95[1] * (noise if self.name == "KL" else math.sqrt(noise)) <= self.limit

    def __str__(self) -> str:
        most = 100 if self.name == "agreement" else math.inf
        value, low, high = (figure(each, most) for each in (self.value, *self.ci95))
        return f"{self.name} {value} ({low} to {high}; limit {self.limit:g})"


@dataclass(frozen=True)
class Verdict:
    """Every criterion of a contract for one candidate."""

    criteria: tuple[Criterion, ...]

    @property
    def met(self) -> bool:
        """Whether every criterion is met beyond noise."""
        return all(criterion.met for criterion in self.criteria)

    def met_with(self, noise: float) -> bool:
        """Whether every criterion would be, if the error's power were ``noise`` times what it is."""
        return all(criterion.met_with(noise) for criterion in self.criteria)

    @property
    def within(self) -> bool:
        """Whether every measured value is within its limit, noise or not."""
        return all(c.met or c.needed is not None for c in self.criteria)

    @property
    def excess(self) -> float:
        """That of the worst criterion."""
        return max(c.excess for c in self.criteria)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"met": self.met, "criteria": [asdict(criterion) for criterion in self.criteria]}


@dataclass
class Scores:
    """What one candidate made of each of N validation samples: ``divergence`` from the float outputs (float64),
    ``agree`` (float64 shares, None without logits) and the task's sums by name (float64)."""

    divergence: Tensor
    agree: Tensor | None
    sums: Sums


def require_agreeable(config: QuantizeConfig, count: int) -> None:
    """Raises UsageError where ``count`` samples that all agree would not show the least agreement to be kept."""
    if config.min_agreement is not None:
        _require_samples(count, _least_alike(config.min_agreement / 100), "--min-agreement")


def _require_samples(count: int, needed: float, flag: str, ignored: int = 0) -> None:
    """Raises UsageError where fewer than ``needed`` of ``count`` samples are left without those that are ignored."""
    if needed > count - ignored:
        finite = math.isfinite(needed)
        least = f"at least {needed:,.0f}" if finite else "more than any number of"
        raise UsageError(
            f"contract {flag}", f"{least} validation samples to tell it from noise, even where none differs",
            f"{count - ignored:,}{f' that count among {count:,}' if ignored else ''}",
            "give more validation data, or promise less" if finite else "promise less: no validation data proves it",
        )  # fmt: skip


class Judge:
    """The validation set, the float model's answers to it, and the contract that candidates are held to.

    ``batches`` are (inputs, targets) that can be gone through again and again, targets None where there are no labels.
    Where they are but the first of ``total`` samples, and the model is not trained yet, what its answers are worth is
    not looked at. Raises UsageError for a metric that the task does not have or that is another in batches than sample
    by sample, for labels that are not there, and for fewer samples than could ever show the contract to be kept.
    """

    def __init__(
        self, config: QuantizeConfig, batches: Batches, reference: Callable[[Any], Any], task: Task | None,
        total: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.batches, self.task, self.reference = config, batches, task, reference
        self.outputs: list[Tensor | None] = []
        self.axis: int | None = None
        self.shapes, self.num_outputs = "", 0
        self.num_samples, held = 0, 0
        self.counted: list[Tensor | None] = []
        self.metric = config.metric or (task.metric if task else "")
        parts, weights = [], []
        whole = None if task is None or config.max_drop is None else evaluate.Sums(task)
        for inputs, targets in batches:
            output = _on_cpu(reference(inputs))
            wanted = _answered(output, num_samples(inputs))
            self.shapes = f"outputs {tuple(wanted.shape)}"
            if isinstance(targets, Tensor):
                self.shapes += f", targets {tuple(targets.shape)} ({str(targets.dtype).removeprefix('torch.')})"
            axis = class_axis(wanted, targets, asked=(config.max_kl, config.min_agreement) != (None, None))
            self.axis = axis if not self.outputs or axis is None else self.axis  # a few targets may look like classes
            self.num_outputs = len(list(tensors(output)))
            self.num_samples += len(wanted)
            held += wanted.nbytes
            self.outputs.append(wanted if held <= KEPT else None)
            self.counted.append(None if self.axis is None else counted(targets, wanted, self.axis))
            sums, weight = self._task_sums(output, targets)
            parts.append(sums)
            weights.append(weight)
            if whole is not None:
                whole.add(output, targets)
        if not self.outputs:
            raise QtoolError("contract", "validation samples", "none", "give validation data")
        self.sums, self.paired = joined(parts), Paired(task, torch.cat(weights))
        self._check_asked()
        self._require_enough(total)
        if total is None and whole is not None:
            self._require_meaning(whole.means()[self.metric])

    @property
    def known(self) -> dict[str, Tensor]:
        """What scores depend on beside the model's answers: what the targets say of each sample, plain tensors."""
        counted = {f"counted {index}": some for index, some in enumerate(self.counted) if some is not None}
        axis = torch.tensor(-1 if self.axis is None else self.axis)
        return {**self.sums, "weights": self.paired.weights, "axis": axis, **counted}

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better, so that a drop of it is a loss; of another a rise is one."""
        return self.task is None or bool(is_higher_better(self.task, self.metric))

    @torch.no_grad()
    def score(self, predict: Callable[[Any], Any]) -> Scores:
        """Runs a candidate on every validation sample."""
        apart, agree, parts = [], [], []
        for kept, some, (inputs, targets) in zip(self.outputs, self.counted, self.batches, strict=True):
            wanted = _first(_on_cpu(self.reference(inputs))) if kept is None else kept
            output = _on_cpu(predict(inputs))
            given = _first(output)
            apart.append(_apart(wanted, given, self.axis, some))
            if self.axis is not None:
                agree.append(_means((wanted.argmax(self.axis) == given.argmax(self.axis)).double(), some))
            parts.append(self._task_sums(output, targets)[0])
        return Scores(torch.cat(apart), torch.cat(agree) if agree else None, joined(parts))

    def verdict(self, scores: Scores) -> Verdict:
        """What the contract says of a candidate."""
        config, found = self.config, []
        if config.max_drop is not None:
            found.append(self._drop(scores, config.max_drop))
        if config.max_kl is not None:
            found.append(_kl(scores.divergence, config.max_kl))
        if config.min_agreement is not None:
            assert scores.agree is not None
            found.append(_agreement(float(scores.agree.sum()), len(scores.agree), config.min_agreement))
        return Verdict(tuple(found))

    def better(self, one: Scores, other: Scores) -> bool:
        """Whether ``one`` is closer to the float model than ``other``, by more than noise."""
        if not other.divergence.isfinite().all():
            return bool(one.divergence.isfinite().all())
        low, _ = mean_interval(other.divergence - one.divergence)
        return low > 0

    @torch.no_grad()
    def _task_sums(self, output: Any, targets: Any) -> tuple[Sums, Tensor]:
        """The task's sums and weight of every sample alone; nothing where no drop is asked for."""
        size = num_samples(output)
        if self.config.max_drop is None:
            return {}, torch.ones(size, dtype=torch.float64)
        if targets is None or self.task is None:
            raise UsageError(
                "--max-drop", "labels to measure the metric with", "none", "use --max-kl or --min-agreement"
            )
        return sums_of(self.task, output, targets)

    def _check_asked(self) -> None:
        """Raises UsageError for a contract that the task, its labels or the model's outputs have no answer to."""
        config = self.config
        if config.max_drop is not None and self.metric not in (known := self.paired.means(self.sums)):
            name = f"task '{self.task.name if self.task else 'none'}'"
            asked = ("--metric", f"a metric of {name}") if config.metric else (name, "a 'metric' that it gives")
            raise UsageError(*asked, repr(self.metric), nearest(self.metric, known))
        if config.max_drop is not None and self.task and is_higher_better(self.task, self.metric) is None:
            raise UsageError(
                "--metric", "one that is known to be better when it is higher or lower",
                f"'{self.metric}', of which nothing says whether more is better",
                f"give the task directions = {{'{self.metric}': False}} where less is",
            )  # fmt: skip
        if config.max_drop is None and config.metric is not None:
            raise UsageError("--metric", "--max-drop beside it", "none", "say how much of the metric may be lost")
        if (config.max_kl is not None or config.min_agreement is not None) and self.axis is None:
            raise UsageError(
                "contract", "logits (N×C, N×T×C or N×C×H×W) of classes for KL or agreement",
                self.shapes,
                "use --max-drop with a metric",
            )  # fmt: skip

    def _require_enough(self, total: int | None) -> None:
        count = self.num_samples if total is None else total
        ignored = self.num_samples - self.paired.num_counted if total is None else 0
        _require_samples(count, self._least_for_drop(is_whole=total is None), "--max-drop", ignored)
        require_agreeable(self.config, count)
        _require_samples(count, LEAST if self.config.max_kl is not None else 0, "--max-kl")

    def _require_meaning(self, whole: float) -> None:
        """Raises UsageError for a metric that is another in batches: of single samples nothing could be promised."""
        alone = self.paired.means(self.sums)[self.metric]
        if math.isnan(alone):
            raise QtoolError(
                "contract", f"a '{self.metric}' of the float model on the validation samples", "NaN",
                "clean their targets, or have the task leave out what is unknown",
            )  # fmt: skip
        if not is_alike(whole, alone):
            raise UsageError(
                "--max-drop", "a metric that adds up over samples which the task judges alone",
                f"'{self.metric}', {figure(whole)} in batches and {figure(alone)} sample by sample",
                "have the task return sums over samples and their number, or use another --metric, --max-kl or "
                "--min-agreement",
            )  # fmt: skip

    def _least_for_drop(self, *, is_whole: bool) -> float:
        """The fewest samples on which equal answers would show the drop to be within its limit.

        A few of which all are wrong do not tell that each can only be right or wrong.
        """
        if self.config.max_drop is None:
            return 0
        if not self.paired.is_mean(self.metric, self.sums):
            return LEAST
        found = self.sums[self.metric]
        if not (self.paired.is_counted(found) and (is_whole or bool(found.any()))):
            return LEAST
        return max(LEAST, _least_alike(1 - self.config.max_drop / 100))

    def _drop(self, scores: Scores, limit: float) -> Criterion:
        gain = -100.0 if self.higher_is_better else 100.0
        change, within = self.paired.change(self.metric, self.sums, scores.sums)

        def at(total: int) -> tuple[float, float]:
            low, high = sorted(gain * end for end in within(total))
            return low, high

        return _judged("drop", limit, gain * change, at, self.num_samples)


def _least_alike(share: float) -> float:
    """The fewest samples on which equal answers show that at least this share of all are equal."""
    return math.ceil(Z95**2 * share / (1 - share)) if share < 1 else math.inf


def _kl(divergence: Tensor, limit: float) -> Criterion:
    def at(total: int) -> tuple[float, float]:
        low, high = mean_interval(divergence, total)
        return max(0.0, low), high  # as no divergence is below it

    return _judged("KL", limit, float(divergence.mean()), at, len(divergence))


def _agreement(count: float, total: int, limit: float) -> Criterion:
    def at(size: int) -> tuple[float, float]:
        low, high = wilson_interval(count * size / total, size)
        return -100 * high, -100 * low

    flipped = _judged("agreement", -limit, -100 * count / total, at, total)
    low, high = flipped.ci95
    return Criterion("agreement", limit, -flipped.value, (-high, -low), flipped.met, flipped.needed)


def _judged(name: str, limit: float, value: float, at: Interval, total: int) -> Criterion:
    """A criterion whose value, of ``total`` samples, is to be at most ``limit``."""
    low, high = at(total)
    met = True if high <= limit else False if low > limit else None
    needed = enough(lambda size: at(size)[1] <= limit, total) if met is None and value < limit else None
    return Criterion(name, limit, value, (low, high), met, needed)


def _apart(wanted: Tensor, given: Tensor, axis: int | None, some: Tensor | None) -> Tensor:
    """How far each sample's output is from the wanted one, float64; ``axis`` counts the classes of logits."""
    if unlike(wanted, given).any():
        return torch.full((len(given),), math.inf, dtype=torch.float64)
    if axis is None:
        return per_sample(error_of(wanted.double(), given.double())).square().mean(1)
    return _means(divergence(wanted.movedim(axis, -1).double(), given.movedim(axis, -1).double()), some)


def _means(values: Tensor, some: Tensor | None) -> Tensor:
    """The mean of each sample's values (N, or N × positions), of those that are counted where any is."""
    values = per_sample(values)
    if some is None:
        return values.mean(1)
    some = per_sample(some)
    weights = (some | ~some.any(1, keepdim=True)).double()
    return (values * weights).sum(1) / weights.sum(1)


def _on_cpu(output: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().cpu(), output)


def _first(output: Any) -> Tensor:
    return next(iter(tensors(output)))


def _answered(output: Any, size: int) -> Tensor:
    """The first output, with an answer to each of ``size`` samples. Raises QtoolError for one without, and for NaN."""
    wanted = _first(output)
    if not wanted.dim() or len(wanted) != size:
        raise QtoolError(
            "contract", f"a first output with a row for each of {size} samples", f"one of shape {tuple(wanted.shape)}",
            "have the model return it batch first",
        )  # fmt: skip
    if wanted.isnan().any():
        raise QtoolError(
            "contract", "answers of the float model to every validation sample", "NaN among them",
            "check the validation data, and the model's weights",
        )  # fmt: skip
    return wanted


def as_scores(stored: Mapping[str, Any]) -> Scores:
    """What ``vars`` of a Scores gave."""
    return Scores(stored["divergence"], stored["agree"], dict(stored["sums"]))
