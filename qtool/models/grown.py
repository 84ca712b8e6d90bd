"""Buffers that grow, or come into being, while a model trains: one that is made anew has them smaller, or not yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def buffers_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that a model's state has, or will have once there is something in them, by name."""
    return {
        f"{place}.{name}".strip("."): buffer
        for place, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }


def grow(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a model's buffers the shapes that they have in ``state``, so that it can be loaded."""
    for name, own in buffers_of(model).items():
        value, (place, _, last) = state.get(name), name.rpartition(".")
        if value is None:
            continue
        if own is None:
            device = next((parameter.device for parameter in model.parameters()), value.device)
            model.get_submodule(place)._buffers[last] = value.to(device, copy=True)
        elif own.shape != value.shape:
            model.get_submodule(place)._buffers[last] = own.new_empty(value.shape)
