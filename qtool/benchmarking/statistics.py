"""Statistics of repeated timings that need little assumption about how they are distributed.

Timings on a shared machine have a long right tail and jump between levels; means and normal
intervals mislead. Used instead: percentiles, and for how fast a file can be its *quiet time*, the mean of its fastest
runs. What a neighbour does only adds (Chen and Revels, arXiv 1608.04295, who take the minimum), and it does not add
alike: one that shares a core slowed a file of small integer kernels by 30 % and its float form by 15 %, so that the
median of their ratio moved by 13 % within minutes, and the ratio of their quiet times by 3 %.

Rounds are not independent: a neighbour that wakes up is there for seconds, a process has its memory where it has it,
and an interval that counts every round as new evidence becomes narrow around the wrong number. What is drawn anew are
the sittings, the rounds that the same processes were timed in, or with fewer than ``LEAST_SITTINGS`` of them
``BLOCKS`` consecutive blocks (block bootstrap; Künsch, Annals of Statistics 17, 1989). So few tell their own spread
badly: the interval is Student's t times the draws' standard deviation, in logarithms. Of two files that are the same
it left the true ratio out in 2 to 12 % of simulated measurements of four and eight sittings, with processes that
differ by up to 0.7 % and neighbours in up to 40 % of the sittings; percentiles of blocks did in 8 to 63 %. What
changes more slowly than a whole measurement lasts, no interval can know of, nor one of few sittings how processes
differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qtool.intervals import student95

LEAST_ROUNDS = 6
BLOCKS = 10
SHARE, LEAST_RUNS = 0.05, 20
"""A quiet time is the mean of this share of the runs, or of this many where that is more; of half at most."""
LEAST_SITTINGS = 4
_DRAWS = 200


def quiet_ratio(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """The quiet time of ``first`` over that of ``second``: the seconds of their runs, by round.

    The same share of both is taken, so that a clock that drifts moves neither more than the other.
    """
    one, other = np.concatenate(first), np.concatenate(second)
    share = min(0.5, max(SHARE, LEAST_RUNS / min(len(one), len(other))))
    return _fastest(one, share) / _fastest(other, share)


def _fastest(values: npt.NDArray[np.float64], share: float) -> float:
    count = max(1, round(share * len(values)))
    return float(np.partition(values, count - 1)[:count].mean())


def quiet_interval(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], sittings: Sequence[int] = ()
) -> tuple[float, float] | None:
    """The 95 % interval of :func:`quiet_ratio`, or None below six rounds.

    ``sittings`` are the rounds with which new processes began, the first of them 0.
    """
    if len(first) < LEAST_ROUNDS:
        return None
    edges = np.linspace(0, len(first), min(BLOCKS, len(first)) + 1).round().astype(int).tolist()
    if len(sittings) >= LEAST_SITTINGS:
        edges = [*sittings, len(first)]
    blocks = [
        tuple(np.concatenate(rounds[low:high]) for rounds in (first, second)) for low, high in itertools.pairwise(edges)
    ]
    count = len(blocks)
    draws = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    ratios = [quiet_ratio(*zip(*(blocks[index] for index in draw), strict=True)) for draw in draws]
    reach = student95(count - 1) * math.sqrt(count / (count - 1)) * float(np.log(ratios).std())
    ratio = quiet_ratio(first, second)
    return ratio * math.exp(-reach), ratio * math.exp(reach)


def spread(values: Sequence[float]) -> float:
    """Relative spread of the bulk of the values: 1.4826 × median absolute deviation / median.

    For normal values this is the standard deviation over the mean; a few outliers do not move it.
    """
    middle = float(np.median(values))
    return 1.4826 * float(np.median(np.abs(np.asarray(values) - middle))) / middle if middle else 0.0


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles and mean of timings, in milliseconds."""
    p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(seconds, (50, 90, 99)))
    return {
        "latency_p50_ms": p50,
        "latency_p90_ms": p90,
        "latency_p99_ms": p99,
        "latency_mean_ms": float(np.mean(seconds)) * 1e3,
    }


def quantile_sketch_ms(seconds: Sequence[float]) -> list[float]:
    """Evenly spaced quantiles in milliseconds: the distribution, small enough to keep in a report."""
    return [float(v) * 1e3 for v in np.quantile(seconds, np.linspace(0, 1, 101))]
