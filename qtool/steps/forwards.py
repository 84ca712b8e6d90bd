"""Another forward pass in a module's own place: a compiled one, or one that runs it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qtool.steps import moved_buffers
from qtool.system.devices import load_inductor


def compiled(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """``function``, a forward pass of ``module``, compiled. What predicts a step puts its own in this one's place."""
    load_inductor()
    return torch.compile(function, options=moved_buffers.options())


def take_place(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Has ``module`` run ``forward``; what that returns gives back what it ran, its class's or one of its own."""
    before = {key: value for key, value in vars(module).items() if key == "forward"}
    module.forward = forward

    def give_back() -> None:
        vars(module).pop("forward", None)
        vars(module).update(before)

    return give_back
