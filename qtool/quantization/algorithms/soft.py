"""Soft rounding: a weight that learns whether each of its values is rounded down or up (AdaRound, arXiv 2004.10568).

With s the scale and r the real value of a weight in steps,

    ŵ = s · clamp(⌊r⌋ + h(V), qmin, qmax),    h(V) = clamp(1.2 · sigmoid(V) − 0.1, 0, 1)

V starts where h(V) = r − ⌊r⌋, so that ŵ starts as the real weight. What drives h to 0 or 1 is

    λ(t) · mean over weights of 1 − (2h − 1)²,    λ(t) = 0.1 · 1000^t,  t = 0 … 1 after the warm-up

a penalty that grows until every value is decided: first those decide that matter least, and the others make good what
this did. In the end ⌊r⌋ + (h ≥ ½) are integers. (AdaRound keeps λ and lets an exponent fall from 20 to 2 instead, which
needs 10,000 steps and more: of 500 steps it left most values undecided, and rounding these tripled the error that a
growing λ reaches.)

The weights may have been rounded by another method before. Then r is the real weight moved to within half a step of
the integer that is there, and learning goes on from that one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qtool.graphs.operators import output_axis
from qtool.quantization.stored_weights import ends_of, integers_of, scales_of

LOW, HIGH = -0.1, 1.1
DECIDED = 10.0
"""A logit whose value is rounded up, and its negative down, for good."""
STRENGTH, GROWTH = 0.1, 1000.0
"""λ at first, and how many times as much it is at last."""


class SoftWeight(nn.Module):
    """The weight of one layer and the shift of its bias while they are learned.

    ``real`` are real weights, ``integers`` those that the layer has, ``scale`` one per index of ``axis`` or for each.
    ``ends`` are the least and the greatest integer; ``spread``, one per output, is the unit in which the shift of the
    bias is learned.
    """

    def __init__(
        self, real: Tensor, integers: Tensor, scale: Tensor, axis: int, ends: tuple[int, int], spread: Tensor
    ) -> None:
        super().__init__()
        self.outputs = [real.shape[axis] if dim == axis else 1 for dim in range(real.dim())]
        each = scale if scale.shape == real.shape else scale.reshape(self.outputs)
        self.scale, self.ends, self.spread = each.to(real.dtype), ends, spread
        self.before = integers.to(real.dtype)
        near = torch.minimum(torch.maximum(real / self.scale, self.before - 0.499), self.before + 0.499)
        self.floor = near.floor()
        share = (near - self.floor).clamp(0.001, 0.999)
        self.logits = nn.Parameter(torch.logit((share - LOW) / (HIGH - LOW)))
        self.shift = nn.Parameter(torch.zeros_like(spread))

    def share(self) -> Tensor:
        """h(V): how far up each value is rounded."""
        return (torch.sigmoid(self.logits) * (HIGH - LOW) + LOW).clamp(0, 1)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weight, what is added to the bias, and how undecided it is: the mean of 1 − (2h − 1)²."""
        share = self.share()
        weight = (self.floor + share).clamp(*self.ends) * self.scale
        return weight, self.shift * self.spread, 1 - (2 * share - 1).square().mean()

    @torch.no_grad()
    def integers(self) -> Tensor:
        """What the weight is rounded to."""
        return (self.floor + (self.share() >= 0.5)).clamp(*self.ends)

    @torch.no_grad()
    def shifts(self) -> Tensor:
        """What is added to the bias."""
        return self.shift * self.spread

    @torch.no_grad()
    def take_back(self, channels: Tensor) -> None:
        """Gives some output channels the integers and the bias that they had."""
        where = channels.reshape(self.outputs)
        up = (self.before > self.floor).to(self.floor.dtype)
        self.logits.copy_(torch.where(where, (2 * up - 1) * DECIDED, self.logits))
        self.shift.masked_fill_(channels, 0.0)


def strength(share: float) -> float:
    """λ when ``share`` of the time after the warm-up is over."""
    return float(STRENGTH * GROWTH**share)


def soften(graph: GraphModule, layer: Node, real: Tensor, spread: Tensor) -> SoftWeight:
    """The soft weight of a quantized layer; ``real`` is its weight in the float graph."""
    integers, scales = integers_of(graph, layer), scales_of(graph, layer)
    return SoftWeight(real.float(), integers, scales, output_axis(layer), ends_of(layer), spread)
