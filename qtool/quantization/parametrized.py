"""Weights that a module computes from others, stored as what they come to: weight norm, spectral norm and their like.

Such a weight is a constant in evaluation. Quantization-aware training trains the weight that is quantized: it starts
from what the model's own parametrization comes to and goes on without it. Computed in each step it would be no stored
weight, and its layer would stay in float; and spectral norm writes into its buffers in each step. Known are torch's
parametrizations and the hooks that came before them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

_REMOVERS: dict[type, Any] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def with_stored_weights(model: nn.Module) -> nn.Module:
    """``model`` itself where it computes no weight, else a copy in evaluation mode that stores them."""
    if not any(parametrize.is_parametrized(module) or _hooks(module) for module in model.modules()):
        return model
    for module in model.modules():
        for hook in _hooks(module):  # which left a value with its history there; the next call leaves another
            setattr(module, hook.name, getattr(module, hook.name).detach())
    made = copy.deepcopy(model).eval()  # spectral norm takes a step whenever it is asked while training
    for module in made.modules():
        for hook in _hooks(module):
            _REMOVERS[type(hook)](module, hook.name)
        if parametrize.is_parametrized(module):
            _store(module)
    return made


@torch.no_grad()
def _store(module: nn.Module) -> None:
    """Removes a module's parametrizations; torch's own way takes them from the class, which the original shares."""
    values = {name: getattr(module, name).clone() for name in module.parametrizations}  # type: ignore[union-attr]
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if type(hook) in _REMOVERS]
