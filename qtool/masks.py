"""Infinity among a model's tensors: what a mask of attention adds to the places that it hides, and bounds of nothing.

Many models keep such a mask as a buffer, so that there minus infinity is no damage; in a parameter that trains, or in
a running statistic, it is. Others hide by −1e9 or float32's own limit, in whose place half precision has its limit.
A buffer without axes may be either infinity: so layers that clip hold a bound that is not set.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def may_hide(name: str) -> bool:
    """Whether a buffer of this name may be a mask."""
    return not name.endswith(("running_mean", "running_var"))


def masks(model: nn.Module) -> frozenset[str]:
    """The names of the tensors that may be masks: buffers, and what does not train, as the constants of a graph."""
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False) if may_hide(name))
    parameters = model.named_parameters(remove_duplicate=False)
    return frozenset((*buffers, *(name for name, value in parameters if not value.requires_grad)))


def within(value: Any, dtype: torch.dtype) -> Any:
    """A number, or those of a float tensor, cut to the limits of ``dtype``; infinities, and anything else, as they are.

    >>> within(-1e9, torch.float16), within(-math.inf, torch.float16), within(0.5, torch.float16)
    (-65504.0, -inf, 0.5)
    """
    limit = torch.finfo(dtype).max
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.where(value.isinf(), value, value.clamp(-limit, limit))
    beyond = isinstance(value, int | float) and limit < abs(value) < math.inf
    return math.copysign(limit, value) if beyond else value


def is_finite(value: Tensor, *, mask: bool = False) -> bool:
    """Whether a tensor holds no NaN and no infinity, the ``mask``'s minus infinity aside. Integers are not read.

    A ``mask`` without axes may be a bound as well, of either sign.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return True
    value = value._values() if value.is_sparse else value.values() if value.is_sparse_csr else value
    value = value.float() if value.itemsize == 1 else value  # which torch compares no floats of
    if not value.numel():
        return True
    # of both ends, since a tensor of truths for each value is memory that a step, predicted to fit, may have left none
    low, high = (end.item() for end in (torch.view_as_real(value) if value.is_complex() else value).aminmax())
    if mask and not value.dim():
        return not math.isnan(high)
    return high < math.inf if mask else math.isfinite(low) and math.isfinite(high)
