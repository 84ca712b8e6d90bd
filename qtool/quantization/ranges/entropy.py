"""Entropy ranges: the least information lost, KL(P ‖ Q), as TensorRT calibrates, with both ends free.

For a candidate range, ``P`` is the histogram inside it with everything outside added to the outermost bins
(that is what clipping does), and ``Q`` is what the quantizer leaves of it: the values of each level, spread
evenly over those bins of the level that ``P`` has values in, clipped values not included. A narrow range pays
in its outermost bins, a wide one in detail lost inside its levels (Migacz, "8-bit inference with TensorRT", GTC 2017).
Zeros take no part: they are exact in any range, and after a ReLU they would drown the rest.

Two things differ from common versions. The levels are those of the affine grid that would run, zero
point rounded, where TensorRT cuts a symmetric range into equal pieces. And a range under one bin per
level is never tried: there the histogram cannot tell what is lost, and the divergence would be zero by
construction. KL is computed from running sums, one look-up per level and candidate:

    Σ_b P log P − Σ_l T_l log(T_l / n_l)

with ``T_l`` the values and ``n_l`` the occupied bins of level ``l``, and corrections for the two outermost bins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qtool.quantization.ranges.density import Array, Density, RangeOptions, boundaries, grid, search
from qtool.quantization.ranges.histogram import Histogram

Indices = npt.NDArray[np.intp]


def entropy(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range of least divergence between what was seen and its quantization."""
    histogram.require_counts("entropy")
    density = Density.of(histogram)
    if not density.count.any():  # zeros only: any range keeps them
        return options.balanced(min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
    return search(Divergence(density, options), histogram, options)


class Divergence:
    """KL(P ‖ Q) in nats, as a function of candidate ranges; infinite where Q lacks what P has."""

    def __init__(self, density: Density, options: RangeOptions) -> None:
        self.density, self.options = density, options
        self.total = density.count.sum()
        self.below = _running(density.count)
        self.occupied = _running(density.count > 0)
        self.own = _running(_x_log_x(density.count))

    def __call__(self, low: Array, high: Array) -> Array:
        """The divergence of each candidate (low, high)."""
        cells = self._cells(low, high)
        start, stop = cells[:, 0], cells[:, -1]
        values = np.diff(self.below[cells], axis=1)
        occupied = np.diff(self.occupied[cells], axis=1)
        divergence = self.own[stop] - self.own[start]
        clipped = self.below[start], self.total - self.below[stop]
        rows = np.arange(low.size)
        outermost = []
        for bins, extra in zip((start, stop - 1), clipped, strict=True):
            own = self.density.count[bins]
            divergence += _x_log_x(own + extra) - _x_log_x(own)
            level = (cells[:, 1:-1] <= bins[:, None]).sum(axis=1)
            occupied[rows, level] += (own == 0) & (extra > 0)
            outermost.append((level, extra))
        with np.errstate(divide="ignore", invalid="ignore"):
            log_q = np.log(values / occupied)
            divergence -= np.where(values > 0, values * log_q, 0.0).sum(axis=1)
            for level, extra in outermost:
                divergence -= np.where(extra > 0, extra * log_q[rows, level], 0.0)
            divergence = divergence / self.total - np.log(self.total) + np.log(self.below[stop] - self.below[start])
        too_narrow = high - low < self.options.num_levels * self.density.width
        return np.where(too_narrow | np.isnan(divergence), np.inf, divergence)

    def _cells(self, low: Array, high: Array) -> Indices:
        """The first bin of each level, by the middle of the bin, and one past the last: candidates × (levels + 1)."""
        width, first, num_bins = self.density.width, self.density.first, self.density.count.size
        start = np.clip(np.floor(low / width) - first, 0, num_bins - 1)[:, None]
        stop = np.clip(np.floor(high / width) - first + 1, start[:, 0] + 1, num_bins)[:, None]
        scale, zero_point = grid(low, high, self.options)
        inner = np.ceil(boundaries(scale, zero_point, self.options.num_levels) / width - 0.5) - first
        return np.concatenate((start, np.clip(inner, start, stop), stop), axis=1).astype(np.intp)


def _running(values: npt.NDArray[np.generic]) -> Array:
    """Running sums from 0, one longer than ``values``: a sum over bins i…j−1 is ``[j] − [i]``."""
    return np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))


def _x_log_x(x: Array) -> Array:
    return x * np.log(np.where(x > 0, x, 1.0))
