"""Sigmoid and hyperbolic tangent as ONNX Runtime's CPU kernels compute them, to the last bit.

MLAS takes both for a ratio of two polynomials (coefficients from Eigen), in float32 and in fused steps: ``a·b + c``
rounded once, as an FMA instruction does. A dynamically quantized LSTM repeats itself step after step, so that one bit
may become a step of 1/255; what is compared with the runtime has to have the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_PIECE = 2**16
"""Numbers that are worked on at once: what is kept of the steps of a polynomial stays in the CPU's caches."""


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a·b + c`` in float32 rounded once.

    The product of two float32 is exact in float64. Where their sum with ``c``, rounded there, lies midway between two
    float32, it is rounded to odd (Boldo and Melquiond, 2008), after which rounding it again is rounding the exact sum.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    if not _may_lie_midway(total):
        return total.to(torch.float32)
    shadow = total - product
    error = (product - (total - shadow)) + (c - shadow)
    if bool(error.count_nonzero()):
        even = (total.view(torch.int64) & 1) == 0
        towards = torch.copysign(torch.full_like(total, torch.inf), error)
        total = torch.where((error != 0) & even, torch.nextafter(total, towards), total)
    return total.to(torch.float32)


def _may_lie_midway(total: Tensor) -> bool:
    """Whether some float64 lies midway between two float32, or is so small that this is not told by its last bits.

    A sum that is rounded to 0 is 0.
    """
    midway = (total.view(torch.int64) & (2**29 - 1)) == 2**28
    small = (total != 0) & (total.abs() < torch.finfo(torch.float32).tiny)
    return bool((midway | small).any())


def logistic(x: Tensor) -> Tensor:
    """MLAS's float32 sigmoid: a ratio of two polynomials in FMA steps (coefficients from Eigen), within [0, 1]."""
    x = x.clamp(-18.0, 18.0)
    top, bottom = horner(x * x, LOGISTIC_TOP, LOGISTIC_BOTTOM).unbind()
    return (x * top / bottom + 0.5).clamp_min(0.0)


LOGISTIC_RESOLUTION = 2.0**-22
"""How far results of inputs that differ in their last bit may lie apart, although both are small.

It is four steps of the last sum, whose terms are nearly ½ then, and which the quotient's own rounding moves.
"""
LOGISTIC_TOP = (
    4.37031012579801e-11,
    1.15627324459942e-07,
    6.08574864600143e-05,
    8.51377133304701e-03,
    2.48287947061529e-01,
)
LOGISTIC_BOTTOM = (
    6.10247389755681e-13,
    5.76102136993427e-09,
    6.29106785017040e-06,
    1.70198817374094e-03,
    1.16817656904453e-01,
    9.93151921023180e-01,
)


def tanh(x: Tensor) -> Tensor:
    """MLAS's float32 hyperbolic tangent, likewise."""
    x = x.clamp(-9.0, 9.0)
    top, bottom = horner(x * x, TANH_TOP, TANH_BOTTOM).unbind()
    return top * x / bottom


TANH_TOP = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
TANH_BOTTOM = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def horner(x: Tensor, *polynomials: tuple[float, ...]) -> Tensor:
    """Polynomials of ``x``, highest power first, as P × the shape of ``x``; each step is a fused multiply-add.

    All take their steps together, a shorter one beginning with 0. Whether a sum lies midway is asked of all steps at
    once, and only then are they taken one by one: an LSTM takes thousands of them over few numbers, where each operator
    costs the same.
    """
    if x.numel() > _PIECE:
        pieces = [horner(piece, *polynomials) for piece in torch.split(x.flatten(), _PIECE)]
        return torch.cat(pieces, dim=1).reshape(-1, *x.shape)
    coefficients = _together(polynomials, x.device).reshape(-1, len(polynomials), *[1] * x.dim())
    value, *rest = coefficients.double().unbind()
    wide, sums = x.double(), []
    for coefficient in rest:
        sums.append(torch.addcmul(coefficient, value, wide))  # the product is exact, and so the same fused or not
        value = sums[-1].to(torch.float32).double()
    if not _may_lie_midway(torch.stack(sums)):
        return value.to(torch.float32)
    value, *rest = coefficients.unbind()
    for coefficient in rest:
        value = fused_multiply_add(value, x, coefficient)
    return value


@functools.lru_cache
def _together(polynomials: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Their coefficients as float32, powers × polynomials."""
    width = max(map(len, polynomials))
    return torch.tensor([[0.0] * (width - len(each)) + [*each] for each in polynomials], device=device).T.contiguous()
