"""From a range of real numbers to scale and zero point.

    x ≈ scale · (q − zero_point),    q = clamp(round(x / scale) + zero_point, qmin, qmax)

*Affine* (activations): the range is widened to contain 0.0, so that 0.0 is an integer exactly (padding, ReLU);
``scale = (max − min) / (qmax − qmin)``, ``zero_point = qmin − round(min / scale)``. *Symmetric* (weights): the
zero point is 0 and ``scale = max|x| / qmax``. Both are computed in float32, operation by operation as
torch.ao's observers do, so that the two agree bit for bit where they mean the same thing.

Signed 8-bit weights use −127…127. With −128, torch.ao divides by 127.5, and the largest weight, +127.5
steps, is clipped by half a step; the 128th negative level is not worth that, negating a channel would change
its error, and TensorRT's own weights stop at −127. Of 7 bits, for integer kernels that add pairs of products in 16
bits (x86 without VNNI), they are −63…63. Of fewer the level is worth it, 1.2 dB for 4 bits, −8…7: the weight of largest
magnitude is ``qmin``, whatever its sign, so that ``scale = w / qmin`` is negative where it is above zero.

A range of zero width gets ``scale = EPSILON``, torch.ao's guard, so that ``bias / (scale_x · scale_w)`` of a dead
channel stays small. torch.ao gives it to every narrower range as well; here steps may be as small as ``LEAST``, since
values may be in units of which they are few (light's wavelengths in metres, say).
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from qtool.errors import QtoolError

EPSILON = torch.finfo(torch.float32).eps
"""The scale of what is 0, 2^-23."""
LEAST = 2.0**-60
"""The least scale of anything else: the product of two is a normal float32."""


def affine_qparams(
    minimum: float, maximum: float, qmin: int = 0, qmax: int = 255, *, where: str = "range"
) -> tuple[float, int]:
    """(scale, zero_point) of one range; the scale is a float32 value, the zero point from qmin to qmax.

    Raises QtoolError, naming ``where``, unless minimum <= maximum are finite, and if their distance is not.
    """
    scales, zero_points = affine_qparams_of(torch.tensor(minimum), torch.tensor(maximum), qmin, qmax, where=where)
    return float(scales), int(zero_points)


def affine_qparams_of(
    minimum: Tensor, maximum: Tensor, qmin: int = 0, qmax: int = 255, *, where: str = "range"
) -> tuple[Tensor, Tensor]:
    """``affine_qparams`` of many ranges at once: scales float32 and zero points int32, shaped like ``minimum``."""
    low, high = minimum.to(torch.float32), maximum.to(torch.float32)
    _require(low.isfinite() & high.isfinite() & (low <= high), "finite min <= max", (low, high), where)
    scale, zero_point = affine_step(low, high, qmin, qmax)
    _require(scale.isfinite(), "max - min within float32", (low, high), where)
    return scale, zero_point


def affine_step(low: Tensor, high: Tensor, qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    """``affine_qparams_of`` of float32 ends, unchecked: nothing here waits for a GPU. NaN gives a scale of NaN."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = _guarded((high - low) / float(qmax - qmin))
    zero_point = qmin - torch.round(low / scale)
    return scale, zero_point.clamp(qmin, qmax).to(torch.int32)


@overload
def symmetric_qparams(amax: float, qmax: int = 127, *, where: str = "range") -> float: ...
@overload
def symmetric_qparams(amax: Tensor, qmax: int = 127, *, where: str = "range") -> Tensor: ...
def symmetric_qparams(amax: float | Tensor, qmax: int = 127, *, where: str = "range") -> float | Tensor:
    """The scale of the range (−amax, amax) for integers −qmax…qmax; the zero point is 0.

    ``amax``: one number, for a float32 value as a float, or a tensor with one per channel, for float32 scales
    of its shape. Raises QtoolError, naming ``where``, unless amax is finite and not negative.
    """
    if not isinstance(amax, Tensor):
        return float(symmetric_qparams(torch.tensor(amax), qmax, where=where))
    end = amax.to(torch.float32)
    _require(end.isfinite() & (end >= 0), "finite amax >= 0", (end,), where)
    return symmetric_step(end, qmax)


def symmetric_step(end: Tensor, qmax: int) -> Tensor:
    """``symmetric_qparams`` of float32 ends, unchecked, like ``affine_step``."""
    return _guarded(end / float(qmax))


def weight_step(end: Tensor, qmin: int, qmax: int) -> Tensor:
    """The scale of weights whose range has ``end``, of either sign: that of ``qmin``, or of ±``qmax`` if they are even.

    float32 and unchecked, like ``affine_step``.
    """
    return symmetric_step(end.abs(), qmax) if qmin == -qmax else _guarded(end / float(qmin))


def range_qparams(low: Tensor, high: Tensor, of: Any) -> tuple[Tensor, Tensor]:
    """Scale and zero point, int64, of a range for an observer's or a fake-quantizer's integers."""
    if of.qscheme == torch.per_tensor_symmetric:
        scale = symmetric_step(torch.maximum(-low, high).clamp(min=0.0), of.quant_max)
        return scale, torch.zeros_like(scale, dtype=torch.int64)
    scale, zero_point = affine_step(low, high, of.quant_min, of.quant_max)
    return scale, zero_point.to(torch.int64)


def _guarded(scale: Tensor) -> Tensor:
    return torch.where(scale == 0.0, EPSILON, scale.abs().clamp(min=LEAST).copysign(scale))


def _require(valid: Tensor, expected: str, values: tuple[Tensor, ...], where: str) -> None:
    if bool(valid.all()):
        return
    index = int((~valid).reshape(-1).nonzero()[0])
    got = ", ".join(str(value.reshape(-1)[index].item()) for value in values)
    channel = f" in channel {index}" if valid.numel() > 1 else ""
    raise QtoolError(where, expected, got + channel, "check the weights, or the calibration data, for NaN and overflow")
