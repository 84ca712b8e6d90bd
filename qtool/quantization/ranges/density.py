"""What the searching estimators share: options, the histogram as a density, grids, and the search itself.

A candidate range (low, high) means the grid that ``affine_qparams`` would make of it: with ``L`` levels,
``scale = (high − low) / (L − 1)`` and an integer zero point, level ``l`` at ``(l − zero_point) · scale``,
so a cost is the cost of the quantizer that would run, rounding of the zero point included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qtool.errors import UsageError
from qtool.quantization.ranges.histogram import HALF_BINS, Histogram

Array = npt.NDArray[np.float64]
Cost = Callable[[Array, Array], Array]

# The parts of min-max that are tried: evenly where the best range usually is, then by a factor, down to 1 %.
_DENSE = np.concatenate((np.linspace(1.0, 0.25, 100), np.geomspace(0.24, 0.01, 32)))
_COARSE = _DENSE[::6]
_NEAR, _STEP, _FINEST = np.arange(-3.0, 4.0), 0.01, 3e-4


@dataclass(frozen=True)
class RangeOptions:
    """What an estimator is told.

    ``num_levels``: integers that the range is spread over (256 for 8 bits). ``symmetric``: the range
    is to be (−a, a), for a zero point fixed in the middle. ``percentile``: the share of values kept, in percent.
    """

    num_levels: int = 256
    symmetric: bool = False
    percentile: float = 99.99

    def __post_init__(self) -> None:
        if self.num_levels < 3:
            raise UsageError("ranges", "num_levels of 3 or more", str(self.num_levels), "use at least 2 bits")
        if not 50 <= self.percentile <= 100:
            raise UsageError("ranges", "a percentile from 50 to 100", str(self.percentile), "use for example 99.99")

    def balanced(self, low: float, high: float) -> tuple[float, float]:
        """The range as it is, or with ``symmetric`` the smallest (−a, a) around it."""
        end = max(-low, high)
        return (-end, end) if self.symmetric else (low, high)


@dataclass(frozen=True)
class Density:
    """The non-zero values of a histogram: bins that hold them, the outermost cut to the exact extremes.

    ``left``, ``right``, ``count``: one entry per bin, float64; ``first``: index of the first bin on the
    zero-aligned grid of width ``width``. A value at an extreme (the 6 of a ReLU6) is thus a spike at its place.
    """

    left: Array
    right: Array
    count: Array
    first: int
    width: float

    @classmethod
    def of(cls, histogram: Histogram) -> Density:
        """The density of ``histogram``, which must have counts."""
        width = histogram.bin_width
        low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
        first, last = int(np.floor(low / width)), int(np.floor(high / width))
        count = histogram.counts[first + HALF_BINS : last + 1 + HALF_BINS].astype(np.float64)
        count[-first] -= histogram.num_zeros
        left = np.maximum(np.arange(first, last + 1) * width, low)
        right = np.minimum(np.arange(first + 1, last + 2) * width, high)
        left = np.minimum(left, right - 1e-6 * width)  # a spike gets a width to divide by
        return cls(left, right, count, first, width)


def grid(low: Array, high: Array, options: RangeOptions) -> tuple[Array, Array]:
    """(scale, zero_point) of each candidate range; the zero point counts levels from the lowest, from 0."""
    if options.symmetric:
        zero_point = options.num_levels // 2
        return high / (options.num_levels - 1 - zero_point), np.full_like(high, zero_point)
    scale = (high - low) / (options.num_levels - 1)
    return scale, np.round(-low / scale)


def boundaries(scale: Array, zero_point: Array, num_levels: int) -> Array:
    """Where each candidate's grid turns from one level to the next: candidates × (levels − 1), real units."""
    middles: Array = (np.arange(1, num_levels) - 0.5 - zero_point[:, None]) * scale[:, None]
    return middles


def search(cost: Cost, histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range of least ``cost`` that is tried: min-max, narrowed at one or both ends.

    ``cost`` maps arrays of candidate ends to an array of costs. Both costs are jagged, since the grid shifts against
    the data as the ends move, so nothing relies on a slope: pairs on a coarse grid, twice a dense sweep
    of each end with the other held, then a finer and finer neighbourhood. An end at zero stays there.
    Ties go to the wider range, so that nothing is clipped without a gain.
    """
    low, high = options.balanced(min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
    if low == high:
        return low, high

    def best_of(below: Array, above: Array) -> tuple[float, float]:
        index = int(np.argmin(cost(low * below, high * above)))
        return float(below[index]), float(above[index])

    one_end = options.symmetric or low == 0 or high == 0  # the other end mirrors it, or is zero
    if one_end:
        below, above = best_of(_DENSE, _DENSE)
    else:
        below, above = best_of(*_pairs(_COARSE, _COARSE))
        for _ in range(2):
            below, above = best_of(*_pairs(_DENSE, np.array([above])))
            below, above = best_of(*_pairs(np.array([below]), _DENSE))
    step = _STEP
    while step > _FINEST:
        near = [np.minimum(end * (1 + _NEAR * step / 3), 1.0) for end in (below, above)]
        below, above = best_of(*(near if one_end else _pairs(*near)))
        step /= 3
    return low * below, high * above


def _pairs(below: Array, above: Array) -> tuple[Array, Array]:
    first, second = np.meshgrid(below, above, indexing="ij")
    return first.ravel(), second.ravel()
