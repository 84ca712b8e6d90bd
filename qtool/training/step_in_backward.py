"""The optimizer's step inside the backward pass: each gradient is used as soon as it is there, and freed.

The gradients of all parameters, four bytes each in float32, are then never there together; the largest
alone is. A weight is changed while the backward pass goes on towards the layers before it, which is
sound because its own gradient and its input's are computed by then.

It excludes whatever needs all gradients at once: accumulation, clipping by the global norm, and loss
scaling, which looks at them all to decide on the step. Out of memory within a backward pass leaves
weights half updated, so no checkpoint is written then: the last whole one stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qtool.step import Setup


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
    group = optimizer.param_groups[0]

    def step(parameter: torch.Tensor) -> None:
        whole = group["params"]
        group["params"] = [parameter]
        optimizer.step()
        group["params"] = whole
        parameter.grad = None

    return step
