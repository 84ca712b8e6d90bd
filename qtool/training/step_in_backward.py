"""The optimizer's step inside the backward pass: each gradient is used as soon as it is there, and freed.

The gradients of all parameters, four bytes each in float32, are then never there together; the largest alone is, with
small ones that wait until together they are worth an update (``pieces``): on a GPU about those of a block of a large
transformer, whose activations are freed when its gradients are there. Those that are updated one by one in any case
(``rounding.WideUpdates.is_alone``) wait for nothing. A weight is changed while the backward pass goes on towards the
layers before it, which is sound because its own gradient and its input's are computed by then.

It excludes whatever needs all gradients at once: accumulation, clipping by the global norm, and loss
scaling, which looks at them all to decide on the step. Out of memory within a backward pass leaves
weights half updated, so no checkpoint is written then: the last whole one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qtool.steps.setup import Setup
from qtool.training import pieces

EARLY = 3
"""One such part of a piece is enough until a whole one has been updated: when the backward pass begins, every block's
activations are there, and nothing else should be."""


def apply(setup: Setup, example: Any) -> None:
    """Has each parameter's gradient trigger its update."""
    inner = setup.make_optimizer
    setup.updates_in_backward = True

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = inner(parameters)
        hook = _stepper(optimizer)
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            setup.on_close.append(handle.remove)
        return optimizer

    setup.make_optimizer = make


def _stepper(optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
    """Updates as gradients come. What waits at the end of the backward pass is left to the step that follows it."""
    parameters = optimizer.param_groups[0]["params"]
    enough, late = pieces.piece(parameters), pieces.late(parameters)
    quarter = sum(parameter.numel() for parameter in parameters) / 4
    is_alone: Callable[[torch.Tensor], bool] = getattr(optimizer, "is_alone", lambda parameter: False)
    waiting: dict[torch.Tensor, int] = {}
    waiting_now, updated_now, within = 0, 0, False

    def after(*_: Any) -> None:
        nonlocal waiting_now, updated_now
        if not within:
            waiting.clear()
            waiting_now = updated_now = 0

    optimizer.register_step_post_hook(after)

    def updated(parameters: Iterable[torch.Tensor]) -> None:
        nonlocal updated_now
        for parameter in parameters:
            parameter.grad = None
            updated_now += parameter.numel()

    def step(parameter: torch.Tensor) -> None:
        nonlocal waiting_now, within
        if is_alone(parameter):
            optimizer.update_alone(parameter)  # type: ignore[attr-defined]
            updated([parameter])
            return
        waiting_now += 0 if parameter in waiting else parameter.numel()
        waiting[parameter] = parameter.numel()
        if waiting_now < enough * (1 / EARLY if updated_now < enough else late if updated_now > quarter else 1):
            return
        group = optimizer.param_groups[0]  # another one once a state was loaded
        whole, group["params"], within = group["params"], list(waiting), True
        optimizer.step()
        group["params"], within = whole, False
        updated(waiting)
        waiting.clear()
        waiting_now = 0

    return step
