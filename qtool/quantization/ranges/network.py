"""Network-error ranges: output-error ranges, wider where what is clipped adds up at the network's outputs.

The other estimators count errors one by one, as if they were independent. Those of rounding nearly are. Those of
clipping are not: all that is cut off a channel that sticks out has one sign, and whatever sums over positions or
channels behind it adds it up. With J the derivative of the network's outputs by the tensor and v random signs,

    E‖J e‖² = E[(g · e)²],    g = Jᵀ v

for an error e of any kind (Hutchinson's estimator, as in ``importance.py``, but without leaving out what errors do
together). So the cost of a range is

    G · MSE(range) + E[(g · e_clip)²],    G = E[Σ g²] over values that are not zero

with the mean squared error a value as ``output`` weighs it. The second term needs g only where values lie beyond the
range that the first term alone asks for, since it can but widen that: few values, whose sums of g by sample
and bin (``Tails``) tell it for every wider range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qtool.quantization.histogram import Histogram
from qtool.quantization.ranges.density import Array, Density, RangeOptions, grid
from qtool.quantization.ranges.mse import SquaredError
from qtool.quantization.ranges.output import output

BINS = 256
"""Bins of each tail, from the end of the inner range to the extreme."""
_WIDER = np.linspace(0.0, 1.0, 65)
"""The parts of the way from the inner range to the extremes that are tried."""


@dataclass
class Tails:
    """What a tensor's values beyond (``low``, ``high``) would move the network's outputs by, sample by sample.

    ``rows`` holds for each sample the sums of g in ``2 · BINS`` bins, those of the lower tail first, from the extreme
    ``least`` to ``low`` and from ``high`` to the extreme ``most``; ``energy`` the sums of g² over values not zero.
    """

    low: float
    high: float
    least: float
    most: float
    rows: list[Array] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    @classmethod
    def beyond(cls, histogram: Histogram, options: RangeOptions) -> Tails:
        """Empty tails beyond the range of least output error."""
        ends = options.balanced(min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
        return cls(*output(histogram, options), *ends)

    @property
    def edges(self) -> Array:
        """Where the bins begin, and where the last one of each tail ends: 2 × (``BINS`` + 1)."""
        return np.stack((np.linspace(self.least, self.low, BINS + 1), np.linspace(self.high, self.most, BINS + 1)))

    def clipped(self, low: Array, high: Array) -> Array:
        """E[(g · e_clip)²] of grids that reach from ``low`` to ``high``, no narrower than the inner range."""
        below, above = (self.edges[:, 1:] + self.edges[:, :-1]) / 2
        errors = np.maximum(low[:, None] - below, 0.0), np.minimum(high[:, None] - above, 0.0)
        sums: Array = np.concatenate(errors, axis=1) @ np.stack(self.rows).T
        return np.asarray((sums**2).mean(axis=1))


def network(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range of least error at the network's outputs; that of ``output`` where no gradients are known."""
    histogram.require_counts("network")
    tails, seen = histogram.tails, int(histogram.counts.sum()) - histogram.num_zeros
    if tails is None or not tails.rows or seen <= 0:
        return output(histogram, options)
    rounding, energy = SquaredError(Density.of(histogram), options), float(np.mean(tails.energy))
    low, high = _candidates(tails, options)
    scale, zero_point = grid(low, high, options)
    least, most = -zero_point * scale, (options.num_levels - 1 - zero_point) * scale
    best = int(np.argmin(energy / seen * rounding(low, high) + tails.clipped(least, most)))
    return float(low[best]), float(high[best])


def _candidates(tails: Tails, options: RangeOptions) -> tuple[Array, Array]:
    low, high = (start + (end - start) * _WIDER for start, end in ((tails.low, tails.least), (tails.high, tails.most)))
    if options.symmetric or tails.low == tails.least or tails.high == tails.most:
        return (low, high) if options.symmetric or len({*low}) > 1 or len({*high}) > 1 else (low[:1], high[:1])
    first, second = np.meshgrid(low[::2], high[::2], indexing="ij")
    return first.ravel(), second.ravel()
