"""Fake quantization with gradients: rounded forward, passed straight through inside the range (arXiv 1806.08342).

    x̂ = s · (clamp(round(x · (1/s)) + z, qmin, qmax) − z),    ∂x̂/∂x = 1 inside the range, 0 outside

PyTorch has a kernel for it, which a compiler can neither trace (it has no form without data) nor fuse with what is
around it. So a compiled graph is given the arithmetic instead, operation by operation what the kernel does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None) -> Tensor:
    """``x``, of any floating type, quantized and dequantized in float32 and given back in its own type.

    ``scale`` (float32) and ``zero_point`` (int32): one value, or with ``axis`` one for each index of that dimension.
    """
    value = x.float()
    if torch.compiler.is_compiling():
        scale = shaped(scale.clone(), x, axis)  # gradients need this step's, and one range may be moved twice in it
        zero_point = shaped(zero_point.clone(), x, axis)
        steps = rounded(value * scale.reciprocal()) + zero_point
        made = (steps.clamp(qmin, qmax) - zero_point) * scale
    elif axis is None:
        made = torch.fake_quantize_per_tensor_affine(value, scale, zero_point, qmin, qmax)
    else:
        made = torch.fake_quantize_per_channel_affine(value, scale, zero_point, axis, qmin, qmax)
    return made.to(x.dtype)


def rounded(value: Tensor) -> Tensor:
    """Rounded half to even; the gradient passes as if it were not."""
    return value + (value.round() - value).detach()


def shaped(parameter: Tensor, value: Tensor, axis: int | None) -> Tensor:
    """``parameter``, one for each index of ``axis``, as it multiplies ``value``; a single one stays as it is."""
    if axis is None:
        return parameter
    return parameter.reshape([-1 if dim == axis % value.dim() else 1 for dim in range(value.dim())])
