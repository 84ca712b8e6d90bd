"""A model's outputs as one vector, which errors are counted in, and values on the way to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtool.evaluate import signal_of
from qtool.nested import tensors


def floating(value: Any) -> list[Tensor]:
    """The floating point tensors among outputs."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def rates(outputs: Any) -> list[Tensor]:
    """One over each output's root mean square, so that outputs of different sizes matter alike."""
    return [signal_of(value.float()).square().mean().clamp(min=1e-30).rsqrt() for value in floating(outputs)]


def tapped(value: Tensor) -> tuple[Tensor, Tensor]:
    """``value`` as one to take gradients by, and what to pass on in its place, which may be changed in place."""
    leaf = value if value.requires_grad else value.detach().requires_grad_()
    return leaf, leaf.clone()


def vector(outputs: Any, by: list[Tensor]) -> Tensor:
    """All floating point outputs times their rates in one dimension, float32; what is infinite (masked) as zeros."""
    pairs = zip(floating(outputs), by, strict=True)
    return torch.cat([signal_of(value.float()).flatten() * rate for value, rate in pairs])
