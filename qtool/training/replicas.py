"""Data parallelism with a copy of the model in each process (DDP, arXiv 2006.15704).

Each process's backward pass makes the gradients of its share of the batch; they are averaged over the
processes in buckets, while the backward pass goes on with the layers before. All copies then make the same
update. With micro-batches, gradients are exchanged once, with the last.

Buffers are not exchanged in each step: batch-norm normalises by a process's own share, and its running
statistics are averaged before they are used (``qtool.processes.agree_on_buffers``).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from qtool.nested import tensors
from qtool.step import Setup, answer, trained


def apply(setup: Setup, example: Any) -> None:
    """Has forward passes go through a wrapper that averages gradients; the model itself stays as it is."""
    device = [setup.device] if setup.device.type == "cuda" else None
    # ``broadcast_buffers`` off: see above. A view of the bucket in the gradient's place saves a copy of all gradients.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames ``broadcast_buffers``, earlier ones need it
        replica = DistributedDataParallel(
            setup.model, device_ids=device, broadcast_buffers=False, gradient_as_bucket_view=True,
            find_unused_parameters=_leaves_some_out(setup, example),
        )  # fmt: skip
    setup.replica, setup.accumulating = replica, replica.no_sync
    setup.on_close.append(lambda: _take_off(setup))


def _leaves_some_out(setup: Setup, example: Any) -> bool:
    """Whether a forward pass uses not all parameters: DDP, unless told to look, waits for the gradients of all.

    To look costs time in every step and a warning where all are used, so a pass on ``example`` tells, not compiled.
    Without an example there is none: the data are batches made already, which several processes cannot share.
    """
    if example is None:
        return False
    buffers = [(value, value.clone()) for value in setup.model.buffers()]
    with torch.random.fork_rng(devices=[]), setup.forward(), torch.compiler.set_stance("force_eager"):
        outputs = [t for t in tensors(answer(setup.model.train(), setup.place(example))) if t.requires_grad]
        ones = [torch.ones_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, trained(setup.model), ones, allow_unused=True)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return any(gradient is None for gradient in gradients)


def _take_off(setup: Setup) -> None:
    setup.replica = None
    for parameter in setup.model.parameters():
        parameter.grad = None
