"""MSE ranges: the least expected squared error, E[(x − Q(x))²], over both ends of the range.

With levels ``q_l`` a ``scale`` apart and boundaries ``b_l`` half-way between them, summation by parts turns the
sum over levels into

    E[(x − Q(x))²] = E[(x − q_top)²] − 2 · scale · Σ_l F(b_l),    F(b) = E[max(b − x, 0)]

because ``q_l² − q_(l−1)² = 2 · scale · b_l``. ``F`` is read from running sums over the histogram, with the values
of a bin spread evenly over it, so a candidate costs one look-up per level, however many values there
were; clipping needs no case of its own. The same goal, searched over the data itself, is in Banner et al.
(arXiv 1810.05723) and in most toolkits; there usually one end only, here both.
"""

from __future__ import annotations

import numpy as np

from qtool.quantization.ranges.density import Array, Density, RangeOptions, boundaries, grid, search
from qtool.quantization.ranges.histogram import Histogram


def mse(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range whose quantizer has the least expected squared error on what was seen."""
    histogram.require_counts("mse")
    return search(SquaredError(Density.of(histogram), options), histogram, options)


class SquaredError:
    """The sum of squared errors over the non-zero values, as a function of candidate ranges."""

    def __init__(self, density: Density, options: RangeOptions) -> None:
        self.density, self.options = density, options
        count, width = density.count, density.right - density.left
        middle = (density.left + density.right) / 2
        self.below = np.concatenate(([0.0], np.cumsum(count)))[:-1]  # values left of each bin
        first_moment = np.concatenate(([0.0], np.cumsum(count * middle)))[:-1]
        self.shortfall = self.below * density.left - first_moment  # F at each bin's left edge
        self.per_unit = count / width
        self.width = width
        self.moments = count.sum(), (count * middle).sum(), (count * (middle**2 + width**2 / 12)).sum()

    def __call__(self, low: Array, high: Array) -> Array:
        """Sum of squared errors for each candidate (low, high)."""
        levels = self.options.num_levels
        scale, zero_point = grid(low, high, self.options)
        top = (levels - 1 - zero_point) * scale
        total, first, second = self.moments
        from_top = second - 2 * top * first + top**2 * total
        shortfalls = self._shortfall(boundaries(scale, zero_point, levels)).sum(axis=1)
        error: Array = from_top - 2 * scale * shortfalls
        return error

    def _shortfall(self, b: Array) -> Array:
        """F(b), not divided by the number of values."""
        d = self.density
        index = np.clip(np.floor(b / d.width).astype(np.intp) - d.first, 0, d.count.size - 1)
        inside = b - d.left[index]
        reach = np.clip(inside, 0.0, self.width[index])
        result: Array = (
            self.shortfall[index] + inside * self.below[index] + self.per_unit[index] * reach * (inside - reach / 2)
        )
        return result
