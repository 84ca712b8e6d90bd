"""How far a task's metric of one model is from another's on the same samples, and within what bounds that is known.

A task gives sums over batches, from which nothing can be said of noise. Cut into samples, each of which the task judges
alone, two models answer the same ones, so that what is compared is paired: samples that both answer alike say nothing
about the difference. Its 95 % interval is

* the score interval of paired proportions where every sample is simply right or wrong;
* of other means, that of the mean of paired differences (``intervals.py``); of ratios of sums to first order: with
  value v = Σ dᵢ / Σ wᵢ, the residuals (dᵢ − v wᵢ) / w̄ have mean zero and the value's spread;
* for what is no mean of samples (what a task's ``finish`` makes of sums: an F1 score, a perplexity) the paired
  bootstrap, ``DRAWS`` draws of samples with replacement by a fixed seed. Draws that have no sample of a rare class, or
  none that counts, may leave the metric undefined (0/0): they are left out, as long as they are few;
* where no sample tells the two apart, that of samples that are right or wrong, none of which changed.

Samples that do not count (whose targets are all ignored) tell nothing: they make no interval narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.intervals import mean_interval, paired_interval
from qtool.nested import cut, num_samples
from qtool.tasks import Task, finished, is_undefined, judging, loss_of, metrics_of

DRAWS = 1000
DEFINED = 0.9
"""The least share of the draws that have to give the metric."""
Interval = Callable[[int], tuple[float, float]]
"""The 95 % interval that so many samples give where each is like those at hand."""
Sums = dict[str, Tensor]
"""What a task makes of each of N samples alone, by name; float64."""


@torch.no_grad()
def sums_of(task: Task, output: Any, target: Any) -> tuple[Sums, Tensor]:
    """The task's sums and weight of every sample of a batch alone, float64. Raises QtoolError where the task does.

    Whether samples add up to what the batch gave, and so were told apart, is for the caller to compare.
    """
    task, size = judging(task), num_samples(output)
    rows, weights = [], []
    for index in range(size):
        one, wanted = cut(output, index, index + 1, size, any_axis=True), cut(target, index, index + 1, size)
        loss, weight = loss_of(task, one, wanted)
        rows.append({"loss": float(loss), **{k: float(v) for k, v in metrics_of(task, one, wanted).items()}})
        weights.append(float(weight))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float64) for name in names}
    return columns, torch.tensor(weights, dtype=torch.float64)


def is_alike(whole: float, alone: float) -> bool:
    """Whether a metric of batches is that of their samples alone, to rounding; one of pairs of samples is not."""
    return math.isclose(whole, alone, rel_tol=1e-3, abs_tol=1e-9)


def joined(parts: Sequence[Sums]) -> Sums:
    """The sums of all batches; a sample adds nothing to a metric that the task does not give of it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part.get(name, torch.zeros_like(part["loss"])) for part in parts]) for name in names}


class Paired:
    """A task's metrics over N samples that several models answer; ``weights`` (N, float64) say what each counts."""

    def __init__(self, task: Task | None, weights: Tensor) -> None:
        self.task, self.weights = task, weights

    def means(self, sums: Mapping[str, Tensor], rows: Tensor | None = None) -> dict[str, float]:
        """The task's metrics over all samples, or over ``rows`` of them. Raises QtoolError where none counts."""
        rows = torch.arange(len(self.weights)) if rows is None else rows
        total = float(self.weights[rows].sum())
        if not total:
            where = f"task '{self.task.name}'" if self.task else "samples"
            raise QtoolError(where, "samples that count", "none", "give samples with targets that are not ignored")
        means = {name: float(column[rows].sum()) / total for name, column in sums.items()}
        return {**means, **(finished(self.task, means) if self.task else {})}

    def is_mean(self, metric: str, sums: Mapping[str, Tensor]) -> bool:
        """Whether the metric is the mean of the task's sums, and not what its ``finish`` makes of them."""
        column = sums.get(metric)
        if column is None:
            return False
        return math.isclose(self.means(sums)[metric], float(column.sum() / self.weights.sum()))

    def is_counted(self, column: Tensor) -> bool:
        """Whether each sample that counts is simply right or wrong."""
        known = self.weights == 1
        return bool((known | ((self.weights == 0) & (column == 0))).all() and ((column == 0) | (column == 1)).all())

    @property
    def num_counted(self) -> int:
        """How many samples count: one whose targets are all ignored tells nothing."""
        return int((self.weights != 0).sum())

    def change(self, metric: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, Interval]:
        """How much more the metric is ``after`` than ``before``, in its own units, and the interval of that.

        All of it is NaN where the metric is undefined, as an F1 score of a model that names no sample may be.
        """
        value = self._value(metric, before, after)
        if math.isnan(value):
            return value, lambda total: (value, value)
        within = self._within(metric, before, after, value)
        share = self.num_counted / len(self.weights)
        return value, within if within(len(self.weights)) != (0, 0) else proportions(0, 0, share)

    def _within(self, metric: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor], value: float) -> Interval:
        if not self.is_mean(metric, before):
            return self._bootstrap(metric, before, after, value)
        change = after[metric] - before[metric]
        telling = (self.weights != 0) | (change != 0)
        share, change, weights = float(telling.double().mean()), change[telling], self.weights[telling]
        if all(self.is_counted(sums[metric]) for sums in (before, after)):
            return proportions(float((change > 0).double().mean()), float((change < 0).double().mean()), share)
        residual = (change - value * weights) / weights.mean()  # of mean zero

        def at(total: int) -> tuple[float, float]:
            low, high = mean_interval(residual, round(share * total))
            return value + low, value + high

        return at

    def _bootstrap(
        self, metric: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor], value: float
    ) -> Interval:
        """The 2.5 and 97.5 % points of the change over draws of samples with replacement."""
        count, draw, found = len(self.weights), torch.Generator().manual_seed(0), []
        for _ in range(DRAWS):
            rows = torch.randint(count, (count,), generator=draw)
            found.append(self._value(metric, before, after, rows))
        found = [change for change in found if not math.isnan(change)]
        if len(found) < DEFINED * DRAWS:
            raise QtoolError(
                f"metric '{metric}'", f"an interval, from {DRAWS} draws of {count} samples with replacement",
                f"{DRAWS - len(found)} draws of which it is undefined",
                "give more samples, of rare classes above all, or have the task's 'finish' say what 0/0 is",
            )  # fmt: skip
        ends = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double())
        low, high = map(float, ends)

        def at(total: int) -> tuple[float, float]:
            narrower = math.sqrt(count / total)
            return value + (low - value) * narrower, value + (high - value) * narrower

        return at

    def _value(
        self, metric: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor], rows: Tensor | None = None
    ) -> float:
        """The change over all samples, or over ``rows`` of them; NaN where the metric is undefined."""
        if rows is not None and not self.weights[rows].any():
            return math.nan
        try:
            made, had = (self.means(sums, rows).get(metric, math.nan) for sums in (after, before))
        except QtoolError as error:
            if is_undefined(error):
                return math.nan
            raise
        return made - had


def proportions(only_after: float, only_before: float, share: float) -> Interval:
    """The interval of the change of a share of right answers.

    ``share`` of the samples count, and these shares of those that do are right only after, and only before.
    """

    def at(total: int) -> tuple[float, float]:
        counted = round(share * total)
        return paired_interval(only_after * counted, only_before * counted, counted)

    return at
