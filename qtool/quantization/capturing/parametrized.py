"""Weights that a module computes from others, stored as what they come to: weight norm, spectral norm, pruning.

Such a weight is a constant in evaluation. Quantization-aware training trains the weight that is quantized: it starts
from what the model's own parametrization comes to and goes on without it. Computed in each step it would be no stored
weight, and its layer would stay in float; and spectral norm writes into its buffers in each step. Known are torch's
parametrizations and the hooks that came before them, pruning's among them, whose weights start at 0 and are then
trained as all others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

_HOOKS: dict[type, tuple[str, Callable[[nn.Module, str], Any]]] = {
    WeightNorm: ("name", remove_weight_norm),
    SpectralNorm: ("name", remove_spectral_norm),
    prune.BasePruningMethod: ("_tensor_name", prune.remove),
}
"""For each kind of hook where it has the name of what it computes, and what removes it."""


def with_stored_weights(model: nn.Module) -> nn.Module:
    """``model`` itself where it computes no weight, else a copy in evaluation mode that stores them."""
    if not any(parametrize.is_parametrized(module) or _hooks(module) for module in model.modules()):
        return model
    for module in model.modules():
        for name, _ in _hooks(module):  # a value with its history was left there; the next call leaves another
            setattr(module, name, getattr(module, name).detach())
    made = copy.deepcopy(model).eval()  # spectral norm takes a step whenever it is asked while training
    for module in made.modules():
        for name, remove in _hooks(module):
            remove(module, name)
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


def _hooks(module: nn.Module) -> list[tuple[str, Callable[[nn.Module, str], Any]]]:
    """What hooks of a module compute, by name, and what removes each."""
    return [
        (getattr(hook, field), remove)
        for hook in module._forward_pre_hooks.values()
        for kind, (field, remove) in _HOOKS.items()
        if isinstance(hook, kind)
    ]
