"""Channels last: images and convolution weights in NHWC order.

Convolution kernels on the CPU, depthwise ones most of all, and 16-bit ones on a GPU run faster on that
order. The numbers are the same up to rounding. A model whose code depends on NCHW strides (a ``view``
after a convolution) cannot take it: one forward pass on a training sample finds that out, and the
model then keeps the order that it came with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qtool.errors import OWN
from qtool.graphs.structures import quiet_pytree
from qtool.models.specs import copied
from qtool.nested import call, tensors
from qtool.steps.setup import Setup


def apply(setup: Setup, example: Any) -> None:
    """Lays the model and its inputs out channels-last where it has convolutions and its code allows it."""
    if example is None or not _has_images(setup.model, example):
        return
    _lay_out(setup, torch.channels_last)
    if _runs(setup, example):
        setup.on_close.append(lambda: _lay_out(setup, torch.contiguous_format))
    else:
        _lay_out(setup, torch.contiguous_format)


def _has_images(model: nn.Module, example: Any) -> bool:
    return any(p.dim() == 4 for p in model.parameters()) and any(t.dim() == 4 for t in tensors(example))


def _lay_out(setup: Setup, layout: torch.memory_format) -> None:
    setup.memory_format = layout
    with torch.no_grad():
        for value in (*setup.model.parameters(), *setup.model.buffers()):
            if value.dim() == 4:
                value.data = value.data.contiguous(memory_format=layout)


def _runs(setup: Setup, example: Any) -> bool:
    """Whether a copy of the model runs on the example: a trial on the model itself would move its statistics.

    The copy has the model's own weights: a second set of them could be the peak of the whole training.
    """
    with quiet_pytree():
        model = copied(setup.model, {id(parameter): parameter for parameter in setup.model.parameters()})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            call(model, setup.place(example))
    except OWN:  # what it is, the first step tells
        return False
    return True
