"""Output-error ranges: the least expected squared error at the outputs of the layers that read the tensor.

What an error in one channel costs depends on the weights that read it (``gains.py``): clipping an outlier that nothing
listens to is free, and rounding a channel that everything listens to is dear. The expected squared error at the
readers' outputs is Σ_c g_c E[(x_c − Q(x_c))²], a sum over channels of a function of the value alone. So it is read
from one histogram like the plain squared error, as long as each value was counted with the gain of its channel.
"""

from __future__ import annotations

from qtool.quantization.ranges.density import RangeOptions
from qtool.quantization.ranges.histogram import Histogram
from qtool.quantization.ranges.mse import mse


def output(histogram: Histogram, options: RangeOptions) -> tuple[float, float]:
    """The range of least weighed error; that of least error where nothing that has weights reads the tensor."""
    histogram.require_counts("output")
    return mse(histogram, options)
