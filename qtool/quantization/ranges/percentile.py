"""Percentile ranges: keep a share of the values, clip the rest.

Where the data has both signs, each tail loses half of what is clipped; where it has one (after a ReLU),
the far tail loses all of it and the end at zero stays, since a range always contains 0. With
``symmetric`` the share is of the magnitudes. A quantile is read from the histogram by linear
interpolation inside a bin, as if its values were spread evenly: exact to one bin width.
"""

from __future__ import annotations

import numpy as np

from qtool.quantization.ranges.density import RangeOptions
from qtool.quantization.ranges.histogram import HALF_BINS, Counts, Histogram


def percentile(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range that keeps ``options.percentile`` percent of the values, never beyond what was seen."""
    histogram.require_counts("percentile")
    low, high = histogram.minimum, histogram.maximum
    clipped = 1 - options.percentile / 100
    negative, positive = histogram.counts[:HALF_BINS][::-1], histogram.counts[HALF_BINS:]
    width = histogram.bin_width
    if options.symmetric:
        end = _end(positive + negative, clipped * histogram.total, width)
        return options.balanced(max(low, -end), min(high, end))
    share = clipped / 2 if low < 0 < high else clipped
    below, above = (_end(side, share * histogram.total, width) for side in (negative, positive))
    return min(0.0, max(low, -below)), max(0.0, min(high, above))


def _end(counts: Counts, clipped: float, width: float) -> float:
    """How far from zero the side reaches once its outermost ``clipped`` values are cut off."""
    kept = float(counts.sum()) - clipped
    if kept <= 0:
        return 0.0
    cumulative = np.cumsum(counts)
    index = int(np.searchsorted(cumulative, kept))
    before = float(cumulative[index - 1]) if index else 0.0
    return width * (index + (kept - before) / float(counts[index]))
