"""Learned step sizes: quantizers whose scale is trained with the weights (LSQ, arXiv 1902.08153; LSQ+, 2004.09576).

With x the value, s the scale and z the zero point, and rounding passed straight through by gradients,

    x̂ = s · (clamp(round(x/s) + z, qmin, qmax) − z)
    ∂x̂/∂s = round(x/s) − x/s inside the range, qmin − z below it and qmax − z above it

so that a range is neither the extremes of the data nor their average, but what costs the loss least. Affine
activations learn their offset too (LSQ+): z = qmin + round(b · (qmax − qmin)), where b is the share of the range that
lies below zero. An activation that ends at 0 keeps 0 as the end of its range, since that is its ReLU.

As in LSQ the gradient of s is divided by √(N · (qmax − qmin)), N the number of values per sample (of weights: per
channel). Unlike there, what is stored is ln |s|: under Adam a step is then a share of the scale whatever its size,
and s keeps its sign. Where the activation in front clips, no range goes beyond it by as much as half a step:
runtimes leave the clipping to the range. Ranges start from the calibration, weights' from the least squared error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qtool.quantization.quantizers.fake_quantize import rounded, shaped, within
from qtool.quantization.quantizers.qparams import LEAST, range_qparams

HALF = 0.49
"""Of a step: what rounding takes in at the ends of a range, and no tie."""


class LearnedSteps(nn.Module):
    """Fake-quantizes with a scale that has a gradient; ``axis`` counts channels, None for one scale.

    ``scale``: float32, one value or one per channel, of either sign. ``limits`` are the values between which the
    activation in front lets everything pass, and ``most`` the greatest scale that is allowed. ``zero_point`` is learned
    where it is above ``qmin`` and ``affine``, unless a limit is 0. ``paired``: see ``fake_quantize``.
    """

    sign: Tensor | None

    def __init__(
        self, scale: Tensor, zero_point: int, qmin: int, qmax: int, *, axis: int | None = None, affine: bool = False,
        most: float = math.inf, limits: tuple[float, float] = (-math.inf, math.inf), paired: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qmin, self.qmax, self.axis, self.most, self.zero_point = qmin, qmax, axis, most, zero_point
        self.limits, self.paired = limits, paired
        self.log_scale = nn.Parameter(scale.detach().clone().float().abs().clamp(min=LEAST).log())
        self.register_buffer("sign", scale.detach().float().sign() if bool((scale < 0).any()) else None)
        self.offset: nn.Parameter | None = None
        if affine and zero_point > qmin and 0 not in limits:
            self.offset = nn.Parameter(torch.tensor(float(zero_point - qmin) / (qmax - qmin)))

    def forward(self, x: Tensor, learning: bool) -> Tensor:
        """``x`` quantized and dequantized, in its own type; the scale has a gradient where ``learning``."""
        scale, zero = self._step()
        if not learning:
            scale, zero = scale.detach(), zero.detach()
        scale = shaped(_slowed(scale, self._rate(x)), x, self.axis)
        return _Learned.apply(x, scale, zero, self.qmin, self.qmax, self.paired)  # type: ignore[no-any-return, no-untyped-call]

    def qparams(self) -> tuple[Tensor, Tensor]:
        """Scales, float32, and zero points, int64, of one shape."""
        scale, zero = (value.detach() for value in self._step())
        return scale.reshape(-1), zero.to(torch.int64).expand(scale.reshape(-1).shape).clone()

    def range(self) -> tuple[float, float]:
        """The least and the greatest value of a single scale."""
        scale, zero = (float(value) for value in self.qparams())
        return (self.qmin - zero) * scale, (self.qmax - zero) * scale

    def _step(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point; an activation's range ends no farther out than half a step beyond where it clips."""
        scale, most = self.log_scale.exp(), self.most
        if self.offset is None:
            zero = self.log_scale.new_full((), float(self.zero_point))  # made where it is used
            held = _held(scale, LEAST, most)
            return held if self.sign is None else held * self.sign, zero
        levels = self.qmax - self.qmin
        below = _held(rounded(self.offset * levels), 0, levels)
        low, high = self.limits
        first, last = ((steps.detach() - HALF).clamp(min=LEAST) for steps in (below, levels - below))
        return _held(scale, LEAST, torch.minimum(-low / first, high / last).clamp(max=most)), self.qmin + below

    def _rate(self, value: Tensor) -> float:
        count = value.numel() // max(value.shape[0 if self.axis is None else self.axis], 1) if value.dim() else 1
        return 1 / math.sqrt(max(count, 1) * (self.qmax - self.qmin))


class _Learned(torch.autograd.Function):
    """The equations above. Only ``x`` is kept for the gradient, which whatever made it mostly keeps anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, qmin: int, qmax: int, paired: int | None) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.bounds = qmin, qmax, paired
        steps = within((x.float() / scale).round() + zero, *ctx.bounds)
        made = (steps - zero) * scale
        return made if made.dtype == x.dtype else made.to(x.dtype)  # a conversion to itself: see fake_quantize.py

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero = ctx.saved_tensors
        given, ratio = gradients[0].float(), x.float() / scale
        steps = ratio.round() + zero
        kept = within(steps, *ctx.bounds)
        inside = kept == steps
        change = (kept - zero - torch.where(inside, ratio, 0.0)) * given
        beyond = (torch.where(inside, 0.0, given) * -scale).sum() if ctx.needs_input_grad[2] else None
        return torch.where(inside, given, 0.0).to(x.dtype), change.sum_to_size(scale.shape), beyond, None, None, None


def _held(value: Tensor, low: float, high: Tensor | float) -> Tensor:
    """``value`` within its bounds; the gradient passes as if there were none, so that what is beyond comes back."""
    return value.detach().clamp(min=low).clamp(max=high) + (value - value.detach())


def _slowed(value: Tensor, rate: float) -> Tensor:
    """``value``, its gradient times ``rate``."""
    return value * rate + (value - value * rate).detach()


def learn_steps(fakes: Iterable[Any]) -> None:
    """Gives every calibrated fake-quantizer a learner that starts where its calibration ended; fixed ranges stay.

    None gets wider than what the activation in front of it lets pass.
    """
    for fake in fakes:
        if getattr(fake, "fixed", False):
            continue
        scale, zero_point = fake.calculate_qparams()
        axis = fake.ch_axis if fake.is_per_channel else None
        low, high = torch.tensor((fake.limits if axis is None else None) or (-math.inf, math.inf))
        fake.learner = LearnedSteps(
            scale, int(zero_point.reshape(-1)[0]), fake.quant_min, fake.quant_max, axis=axis,
            affine=fake.qscheme == torch.per_tensor_affine, limits=(float(low), float(high)),
            most=float(range_qparams(low, high, fake)[0]), paired=fake.paired if fake.is_per_channel else None,
        )  # fmt: skip
