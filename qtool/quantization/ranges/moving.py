"""Moving-average ranges: what a sample's least and largest values usually are.

Min-max is ruled by the one most extreme sample. The average of each sample's own extremes follows them all alike, and
clips the tail that only some samples have; taken as a moving average it follows a stream whose statistics drift.
(arXiv 1712.05877 trains with one, over batches; here it is over samples, so that the size of a batch does not matter.)
It looks at the extremes alone: a tensor that has an outlier in every sample keeps its full range.
"""

from __future__ import annotations

import math

from qtool.quantization.ranges.density import RangeOptions
from qtool.quantization.ranges.histogram import Histogram


def moving_average(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The averages of the samples' least and largest values, with 0 inside; (−a, a) around them with ``symmetric``."""
    histogram.require_counts("moving-average")
    low, high = histogram.average
    if math.isnan(low):  # saved without them
        low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    return options.balanced(low, high)
