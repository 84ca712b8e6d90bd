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

from torch.nn.parallel import DistributedDataParallel

from qtool.step import Setup


def apply(setup: Setup, example: Any) -> None:
    """Has forward passes go through a wrapper that averages gradients; the model itself stays as it is."""
    device = [setup.device] if setup.device.type == "cuda" else None
    # ``broadcast_buffers`` off: see above. A view of the bucket in the gradient's place saves a copy of all gradients.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames ``broadcast_buffers``, earlier ones need it
        replica = DistributedDataParallel(
            setup.model, device_ids=device, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    setup.replica, setup.accumulating = replica, replica.no_sync
    setup.on_close.append(lambda: _take_off(setup))


def _take_off(setup: Setup) -> None:
    setup.replica = None
    for parameter in setup.model.parameters():
        parameter.grad = None
