"""Data parallelism with a copy of the model in each process (DDP, arXiv 2006.15704).

Each process's backward pass makes the gradients of its share of the batch; they are averaged over the
processes in buckets, while the backward pass goes on with the layers before. All copies then make the same
update. With micro-batches, gradients are exchanged once, with the last.

DDP waits for the gradient of every parameter, unless it is told to look which of them a forward pass uses. It is given
the loss as a part of the model, so that what it sees is what the loss depends on: an output that no loss reads, of an
auxiliary head say, gives its layers no gradient.

Buffers are not exchanged in each step: batch-norm normalises by a process's own share, and its running
statistics are averaged before they are used (``qtool.system.processes.agree_on_buffers``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qtool.errors import QtoolError
from qtool.nested import cut, num_samples
from qtool.steps import checkpoint
from qtool.steps.setup import LossFunction, Setup, trained
from qtool.system import processes

FEW = 2
"""Samples on which the parameters are found that a loss depends on; batch-norm cannot train on one."""


def apply(setup: Setup, example: Any) -> None:
    """Has losses be computed in a wrapper that averages gradients; the model itself stays as it is."""
    replica = Replica(setup)
    setup.replica, setup.accumulating = replica, replica.alone
    setup.on_close.append(lambda: _take_off(setup))


class Replica:
    """Computes losses on this process's copy of a model. ``inner`` is made with the first of them."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.exchanges = setup, True
        self.inner: DistributedDataParallel | None = None

    def __call__(self, loss: LossFunction, value: Any, target: Any) -> Any:
        if self.inner is None:
            self.inner = _distributed(self.setup, _leaves_some_out(self.setup.model, loss, value, target))
        self.inner.require_backward_grad_sync = self.exchanges
        try:
            return self.inner(loss, value, target)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise QtoolError(
                "--devices", "a loss that depends on the same parameters in every step", "one that left some out",
                "pass --strategy fsdp, train on one device, or have the loss depend on all of them",
            ) from error  # fmt: skip

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block gradients are added up in this process."""
        self.exchanges = False
        try:
            yield
        finally:
            self.exchanges = True


class _Judged(nn.Module):
    """A model and whatever loss it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, value: Any, target: Any) -> Any:
        return loss(self.model, value, target)


def _distributed(setup: Setup, leaves_some_out: bool) -> DistributedDataParallel:
    device = [setup.device] if setup.device.type == "cuda" else None
    # ``broadcast_buffers`` off: see above. A view of the bucket in the gradient's place saves a copy of all gradients.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames ``broadcast_buffers``, earlier ones need it
        return DistributedDataParallel(
            _Judged(setup.model), device_ids=device, broadcast_buffers=False, gradient_as_bucket_view=True,
            find_unused_parameters=leaves_some_out,
        )  # fmt: skip


def _leaves_some_out(model: nn.Module, loss: LossFunction, value: Any, target: Any) -> bool:
    """Whether a loss does not depend on all parameters, in any of the processes.

    To look costs time in every step and a warning where all are used, so a few samples tell, not compiled. They leave
    no trace in generators and buffers.
    """
    size = num_samples(value)
    few = cut((value, target), 0, min(FEW, size), size)
    restore = checkpoint.restorer(model, model.buffers())
    # in this thread, as in a step: autograd's own would have a second workspace of cuBLAS from then on
    with torch.compiler.set_stance("force_eager"), torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(loss(model, *few)[0], trained(model), allow_unused=True)
    restore()
    return any(processes.gather(any(gradient is None for gradient in gradients)))


def _take_off(setup: Setup) -> None:
    setup.replica = None
    for parameter in setup.model.parameters():
        parameter.grad = None
