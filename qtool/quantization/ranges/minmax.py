"""Min-max ranges: everything that was seen. Exact, cheap, and at the mercy of one outlier."""

from __future__ import annotations

from qtool.quantization.ranges.density import RangeOptions
from qtool.quantization.ranges.histogram import Histogram


def minmax(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The least and the largest value seen; with ``symmetric``, the larger magnitude on either side."""
    histogram.require_data()
    return options.balanced(histogram.minimum, histogram.maximum)
