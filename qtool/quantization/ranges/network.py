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

import numpy as np

from qtool.quantization.ranges.density import Array, Density, RangeOptions, grid
from qtool.quantization.ranges.histogram import Histogram
from qtool.quantization.ranges.mse import SquaredError
from qtool.quantization.ranges.output import output
from qtool.quantization.ranges.tails import Tails

_WIDER = np.linspace(0.0, 1.0, 65)
"""The parts of the way from the inner range to the extremes that are tried."""


def beyond(histogram: Histogram, options: RangeOptions) -> Tails:
    """Empty tails beyond the range of least output error."""
    ends = options.balanced(min(histogram.minimum, 0.0), max(histogram.maximum, 0.0))
    return Tails(*output(histogram, options), *ends)


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
