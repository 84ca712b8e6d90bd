"""Quantization ranges: which interval of real numbers the integers are spent on.

A range that is too wide wastes steps on values that hardly occur; one that is too narrow clips. Each
estimator answers from the same histogram, after calibration, so one pass over the data serves all:

==================  ================================================================================
``minmax``          everything that was seen; nothing is clipped
``moving-average``  the average of each sample's own extremes
``percentile``      a given share of the values; the rest is clipped
``mse``             the least expected squared error of quantization
``entropy``         the least Kullback-Leibler divergence between the values and their quantization
``output``          the least expected squared error at the outputs of the layers that read the tensor
``network``         the same, and wider where what is clipped adds up at the network's outputs
==================  ================================================================================

A new estimator is one file with a function ``(Histogram, RangeOptions) -> (minimum, maximum)``, one line in
``ESTIMATORS``, one test. Ranges of ``network`` are fitted to one another afterwards (``common_steps.py``). Weights are
known exactly, channel by channel, and have their own: ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qtool.errors import UsageError, nearest
from qtool.quantization.ranges.density import RangeOptions
from qtool.quantization.ranges.entropy import entropy
from qtool.quantization.ranges.histogram import Histogram
from qtool.quantization.ranges.minmax import minmax
from qtool.quantization.ranges.moving import moving_average
from qtool.quantization.ranges.mse import mse
from qtool.quantization.ranges.network import network
from qtool.quantization.ranges.output import output
from qtool.quantization.ranges.percentile import percentile
from qtool.quantization.ranges.weights import weight_extremes, weight_range

__all__ = ["ESTIMATORS", "RangeOptions", "estimate", "weight_extremes", "weight_range"]

Estimator = Callable[[Histogram, RangeOptions], tuple[float, float]]

ESTIMATORS: dict[str, Estimator] = {
    "minmax": minmax,
    "moving-average": moving_average,
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
    "output": output,
    "network": network,
}


def estimate(histogram: Histogram, method: str = "minmax", **options: Any) -> tuple[float, float]:
    """The range (minimum, maximum), in real units, that ``method`` finds for what ``histogram`` saw.

    ``options`` are the fields of ``RangeOptions``; a method ignores those that it has no use for.
    Except for ``minmax``, which reports what was seen, the range contains 0. Raises UsageError for an
    unknown method or a bad option, QtoolError for a histogram that saw nothing.
    """
    if method not in ESTIMATORS:
        raise UsageError("ranges", "a known method", repr(method), nearest(method, ESTIMATORS))
    return ESTIMATORS[method](histogram, RangeOptions(**options))
