"""Statistics of repeated timings that need no assumption about how they are distributed.

Timings on a shared machine have a long right tail and jump between levels; means and normal
intervals mislead. Used instead: percentiles, the median, and for the median the distribution-free
interval between two order statistics. With n independent values the number below the median is
binomial (n, 1/2), so the k-th smallest and the k-th largest enclose the median with probability
1 - 2 P(Bin(n, 1/2) < k) (David and Nagaraja, Order Statistics, 7.1). Six values are the fewest that
give 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LEAST_ROUNDS = 6


def interval_rank(n: int, confidence: float = 0.95) -> int | None:
    """The greatest k whose order statistics x(k) … x(n+1-k) enclose the median with ``confidence``; None if none do.

    >>> interval_rank(6), interval_rank(5), interval_rank(10)
    (1, None, 2)
    """
    tail, allowed, k = 0.0, (1 - confidence) / 2, 0
    while k < n // 2:
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
        if tail > allowed:
            break
        k += 1
    return k or None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The order-statistic interval of the median; None where there are too few values for one."""
    rank = interval_rank(len(values), confidence)
    if rank is None:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


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


def quantile_sketch_ms(seconds: Sequence[float], points: int = 101) -> list[float]:
    """Evenly spaced quantiles in milliseconds: the distribution, small enough to keep in a report."""
    return [float(v) * 1e3 for v in np.quantile(seconds, np.linspace(0, 1, points))]
