"""Minus infinity among a model's tensors: what a mask of attention adds to the places that it hides.

Many models keep such a mask as a buffer, so that there it is no damage; in a parameter or a running statistic it is.
"""

from __future__ import annotations

import math

from torch import Tensor, nn


def may_hide(name: str) -> bool:
    """Whether a buffer of this name may be a mask."""
    return not name.endswith(("running_mean", "running_var"))


def masks(model: nn.Module) -> frozenset[str]:
    """The names of the buffers that may be masks."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False) if may_hide(name))


def is_finite(value: Tensor, *, mask: bool = False) -> bool:
    """Whether a tensor holds no NaN and no infinity, minus infinity in a ``mask`` aside."""
    finite = value.isfinite()
    return bool((finite | (value == -math.inf) if mask else finite).all())
