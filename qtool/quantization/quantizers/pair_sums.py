"""Weights of 8 bits whose products no x86 CPU saturates.

Without VNNI such a CPU multiplies bytes two at a time and keeps the sum in 16 bits, ``sat16(x₀·q₀ + x₁·q₁)`` with x up
to 255: it is exact whatever x is where the positive and the negative integers of each pair add up to no more than
``MOST``. Weights of 7 bits (63 + 63) are safe in any order and give up half of all steps. Pairs are neighbours in the
order in which a kernel reads a row of weights, though, and few are both large and of one sign: a step that is wider by
a fifth is enough for the others to fit, and none need be where the order can be chosen (``algorithms/pairs.py``).

The order is channels innermost: the inputs of one tap of a convolution, then the next tap. A depthwise kernel
multiplies in 32 bits. Fewer or other than a multiple of four channels, as images have, may be filled up or rearranged
in the file: there no two weights of a row may add up to more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST = (2**15 - 1) // 255
"""What the integers of a pair that have one sign may add up to."""
PAIRED = "paired"
"""Key of a layer's ``meta``: the groups of one whose integers are to fit."""
_WORD = 4


def least_ends(weight: Tensor, groups: int) -> Tensor:
    """Least end of each output's range with 127 steps, float32, so that the nearest integers of ``weight`` fit.

    ``weight``: outputs × inputs of a group × taps…; a linear layer has one group and no taps.
    """
    rows = weight.detach().to(torch.float32)
    if is_depthwise(weight, groups) or not weight.numel():
        return rows.new_zeros(len(weight))
    if _has_no_order(weight):
        sums = torch.maximum(*(_largest_two(side).sum(1) for side in (rows.flatten(1), -rows.flatten(1))))
    else:
        one, other = _pairs(rows)
        sums = rows.flatten(1).abs().amax(1)
        if other.numel():
            sums = torch.maximum(sums, (one + other).flatten(1).abs().amax(1))  # of two signs a pair is the larger
    return sums * (127 / (MOST - 1))  # both may be rounded up by half a step


def fitting(ends: Tensor, weight: Tensor, paired: int | None) -> Tensor:
    """The ends of a weight's ranges, farther out where its integers are to fit and would not.

    ``paired``: the groups of the layer, None of one whose integers need not.
    """
    return ends if paired is None else torch.maximum(ends.abs(), least_ends(weight, paired))


def fitted(integers: Tensor, paired: int | None) -> Tensor:
    """``integers`` with those brought nearer to 0 that do not fit: of a pair the larger, as far as it has to be.

    Where any two are to fit, the largest of a row is, or all beyond half of ``MOST``. ``paired``: as of ``fitting``.
    """
    if paired is None or is_depthwise(integers, paired):
        return integers
    if _has_no_order(integers):
        rows = integers.flatten(1)
        low, high = (-_most(-rows), _most(rows))
        shape = len(rows), *[1] * (integers.dim() - 1)
        return integers.clamp(low.reshape(shape).to(integers.dtype), high.reshape(shape).to(integers.dtype))
    one, other = _pairs(integers if integers.is_floating_point() else integers.to(torch.int16))
    over = ((one + other).abs() - MOST).clamp(min=0)
    first = one.abs() >= other.abs()
    made = torch.stack([one - one.sign() * over * first, other - other.sign() * over * ~first], 2).flatten(1, 2)
    alone = integers[:, made.shape[1] :]
    return torch.cat([made.to(integers.dtype), alone], 1)


def is_depthwise(weight: Tensor, groups: int) -> bool:
    """Whether a convolution has a channel for each group, in and out."""
    return weight.dim() > 2 and groups == len(weight) > 1 and weight.shape[1] == 1


def _has_no_order(weight: Tensor) -> bool:
    """Whether a convolution's channels may lie otherwise in the file, so that any two weights of a row can meet."""
    return weight.dim() > 2 and weight.shape[1] % _WORD > 0


def _most(rows: Tensor) -> Tensor:
    """The greatest number that each row may keep beside its second largest."""
    return (MOST - _largest_two(rows)[:, 1].int()).clamp(min=MOST // 2, max=127)


def _largest_two(rows: Tensor) -> Tensor:
    """Those of each row that are above 0, and 0 where there are fewer."""
    return pad(rows.clamp(min=0), (0, 2)).topk(2, 1).values


def _pairs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of neighbouring inputs, without a last one that has no neighbour."""
    pairs = weight.shape[1] // 2 * 2
    return weight[:, 0:pairs:2], weight[:, 1:pairs:2]
