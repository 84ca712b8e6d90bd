"""Ranges of weights: one per output channel, known exactly. Of few bits, the end that has a level more is told apart.

``mse`` narrows each channel's range where clipping its few largest weights costs less than the finer
steps gain for the rest. At 8 bits the gain is small; at 4 bits it is large. The search is a line search per
channel, all channels at once: the error is a jagged function of the scale, so it is a grid that is tried,
not a descent. Reducing the weights' own error is not yet reducing the error at the layer's output, which
is what AdaRound and its kin do.
"""

from __future__ import annotations

import torch

from qtool.errors import QtoolError, UsageError, nearest
from qtool.quantization.quantizers.fake_quantize import fake_quantize
from qtool.quantization.quantizers.qparams import weight_step

WEIGHT_METHODS = ("minmax", "mse")
_COARSE, _FINE, _NARROWEST = 32, 5, 0.2


def weight_range(
    weight: torch.Tensor, ch_axis: int | None, method: str = "minmax", qmin: int = -127, qmax: int = 127, *,
    where: str = "weight",
) -> torch.Tensor:  # fmt: skip
    """The end of the range of each channel of ``weight``, for ``weight_step``: float32, on its device.

    ``ch_axis``: the dimension that channels are counted along, or None for one range (0-dimensional result).
    ``method``: ``minmax`` (the weight of largest magnitude) or ``mse`` (the best of a grid of fractions of it, and
    of their negatives where ``qmin`` is not −``qmax``; ties go to min-max). Raises QtoolError, naming ``where``, when
    a weight is NaN or infinite, UsageError for an unknown method.
    """
    if method not in WEIGHT_METHODS:
        raise UsageError(where, "a known method of weight ranges", repr(method), nearest(method, WEIGHT_METHODS))
    rows = _rows(weight, ch_axis)
    largest = _largest(rows)
    if not bool(largest.isfinite().all()):
        channel = int((~largest.isfinite()).nonzero()[0])
        raise QtoolError(where, "finite weights", f"NaN or infinity in channel {channel}", "check the checkpoint")
    end = largest if method == "minmax" else _least_error(rows, largest, qmin, qmax)
    return end[0] if ch_axis is None else end


def weight_extremes(weight: torch.Tensor, ch_axis: int | None) -> torch.Tensor:
    """``weight_range`` by ``minmax``, unchecked: nothing here waits for a GPU, and what is not finite stays so."""
    end = _largest(_rows(weight, ch_axis))
    return end[0] if ch_axis is None else end


def _rows(weight: torch.Tensor, ch_axis: int | None) -> torch.Tensor:
    values = weight.detach().to(torch.float32)
    return values.reshape(1, -1) if ch_axis is None else values.transpose(0, ch_axis).flatten(1)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The value of largest magnitude of each row; NaN where there is one."""
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0])
    low, high = rows.aminmax(dim=1)
    return torch.where(high >= -low, high, low)


def _least_error(rows: torch.Tensor, largest: torch.Tensor, qmin: int, qmax: int) -> torch.Tensor:
    """The end of least squared error for each row: a coarse grid of fractions of the largest, then a finer one."""
    best, error = largest.clone(), _squared_error(rows, largest, qmin, qmax)
    whole, signs = largest.abs(), (1.0,) if qmin == -qmax else (1.0, -1.0)
    step = (1 - _NARROWEST) / _COARSE

    def attempt(size: torch.Tensor) -> None:
        for sign in signs:
            end = size.copysign(sign * largest)
            tried = _squared_error(rows, end, qmin, qmax)
            better = tried < error
            best[better], error[better] = end[better], tried[better]

    for index in range(1, _COARSE + 1):
        attempt(whole * (1 - index * step))
    around = best.abs()
    for index in range(1 - _FINE, _FINE):
        attempt(torch.minimum(around + whole * (index * step / _FINE), whole))
    return best


def _squared_error(rows: torch.Tensor, end: torch.Tensor, qmin: int, qmax: int) -> torch.Tensor:
    scale = weight_step(end, qmin, qmax)
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    quantized = fake_quantize(rows, scale, zero_point, qmin, qmax, 0)
    return quantized.sub_(rows).square_().sum(dim=1)
