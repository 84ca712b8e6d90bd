"""Fake quantization with gradients: rounded forward, passed straight through inside the range (arXiv 1806.08342).

    x̂ = s · (clamp(round(x · (1/s)) + z, qmin, qmax) − z),    ∂x̂/∂x = 1 inside the range, 0 outside

PyTorch has one kernel for it. A compiler can neither trace that (it has no form without data) nor fuse it with what is
around it, and on a CPU it handles one value at a time: the same operations one after the other take a quarter of its
time and give the same bits. So the kernel is for other devices, where each launch counts. (Nothing is written in place,
nor returned from an operator that may give its operand: torch 2.11 compiles such a function with gradients of zero.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtool.quantization.quantizers.pair_sums import fitted


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None = None,
    paired: int | None = None,
) -> Tensor:  # fmt: skip
    """``x``, of any floating type, quantized and dequantized in float32 and given back in its own type.

    ``scale`` (float32) and ``zero_point`` (int32): one value, or with ``axis`` one for each index of that dimension.
    ``paired``: the groups of a layer whose weight ``x`` is, if its integers are to fit sums of 16 bits; what has to
    be brought nearer to 0 for it has no gradient, like what is outside the range.
    """
    value = x.float()
    if x.device.type == "cpu" or torch.compiler.is_compiling() or paired is not None:
        made = _Rounded.apply(value, shaped(scale, x, axis), shaped(zero_point, x, axis), qmin, qmax, paired)  # type: ignore[no-untyped-call]
    elif axis is None:
        made = torch.fake_quantize_per_tensor_affine(value, scale, zero_point, qmin, qmax)
    else:
        made = torch.fake_quantize_per_channel_affine(value, scale, zero_point, axis, qmin, qmax)
    return made.to(x.dtype)  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, paired: int | None
    ) -> Tensor:
        steps = (x * scale.reciprocal()).round() + zero_point
        kept = within(steps, qmin, qmax, paired)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(kept == steps)
        return (kept - zero_point) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, gradients[0], 0.0), None, None, None, None, None


def within(steps: Tensor, qmin: int, qmax: int, paired: int | None) -> Tensor:
    """Whole numbers brought into the range, and to where their pairs fit if they are those of a ``paired`` layer."""
    return fitted(steps.clamp(qmin, qmax), paired)


def rounded(value: Tensor) -> Tensor:
    """Rounded half to even; the gradient passes as if it were not."""
    return value + (value.round() - value).detach()


def shaped(parameter: Tensor, value: Tensor, axis: int | None) -> Tensor:
    """``parameter``, one for each index of ``axis``, as it multiplies ``value``; a single one stays as it is."""
    if axis is None:
        return parameter
    return parameter.reshape([-1 if dim == axis % value.dim() else 1 for dim in range(value.dim())])
