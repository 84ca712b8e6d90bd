"""The processes that train one model together, as each of them sees the others.

Every process runs the same program on its own share of each batch; where a number of the whole batch is
needed, all of them call the same function here at the same place, and get the same answer. A program
that runs alone gets the answer for one process, without a word to anybody, so that nothing above asks
which it is.

Processes find each other through the environment that ``torchrun`` sets (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), and so does :mod:`qtool.system.launcher`. Tensors travel over
NCCL between GPUs and over gloo between CPUs. Objects that are gathered travel pickled between processes
of the same run, never to or from a file.

Left out on purpose: anything but data parallelism.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional as _functional  # noqa: F401  # imported later, its defaults would be a group
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import _disable_current_modes

from qtool.errors import QtoolError
from qtool.norms import keeps_statistics

Value = TypeVar("Value")
_MESHES: list[DeviceMesh] = []
"""Those of the group that this process is in."""
_GROUPS = itertools.count()
"""Of the groups that this process has joined, as the others have."""


def launched() -> bool:
    """Whether this process was started as one of several, by ``torchrun`` or :mod:`qtool.system.launcher`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """Which process this is, from 0; the first one writes and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the first one, or will be when it has joined its group."""
    return int(os.environ["RANK"]) == 0 if launched() else rank() == 0


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Inside the block this process is one of its group: of those that were launched with it, or a group of one.

    A block that ends without an error leaves no thread of the group's behind. One of several on GPUs that fails leaves
    its group as it is: NCCL would have it wait for the others, who wait for it in an exchange.
    """
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched():
        store, place, count = next(rendezvous("env://"))
        # the store outlives processes that torchrun starts again, and groups, and keeps the addresses of both
        store = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_GROUPS)}", store)
        dist.init_process_group(backend, store=store, rank=place, world_size=count)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        yield
    except BaseException:
        if device.type != "cuda" or size() == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    _let_go()
    del group  # last, see there


def _let_go() -> None:
    """Has nothing but :func:`joined` hold a group that is over; its threads end with it.

    They keep an exchanged tensor for a moment longer, and one that gives it back while the interpreter ends aborts the
    process. torch keeps meshes in its caches, and they keep the group. Whoever holds it last waits for the threads and
    must not hold the interpreter, which they need: the group's own end does not, that of what DDP keeps of it does.
    """
    for made in _MESHES:
        vars(made).get("_pg_registry", {}).clear()
    _MESHES.clear()
    gc.collect()


@contextmanager
def pretended(count: int) -> Iterator[None]:
    """Inside the block this process is the first of ``count``; the others are not there, and exchanges do nothing.

    For fake tensors, which have nothing to exchange. Raises QtoolError within a real group.
    """
    if dist.is_initialized():
        raise QtoolError("prediction", "a process without a group", "one of several", "predict before they start")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh(device: torch.device) -> DeviceMesh:
    """All processes in a row, as sharding wants them; made of real numbers also where tensors are fake."""
    with _disable_current_modes():
        made = init_device_mesh(device.type, (size(),))
    _MESHES.append(made)
    return made


def wait() -> None:
    """Returns when all processes have come here."""
    gather(None)


def gather(value: Value) -> list[Value]:
    """What each process gave, in order of rank."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Value) -> Value:
    """What the first process gave."""
    if size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def total(value: Any) -> Any:
    """The sum over all processes of a tensor (of one shape everywhere) or a number."""
    if size() == 1:
        return value
    summed = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed if isinstance(value, Tensor) else summed.item()


@dataclass(frozen=True)
class Share:
    """This process's part of samples in order: ``start`` … ``stop``-1. No process has more than ``largest``."""

    start: int
    stop: int
    largest: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def share(count: int) -> Share:
    """This process's share of ``count`` samples; shares differ by one sample at most, and may be empty.

    >>> share(5)
    Share(start=0, stop=5, largest=5)
    """
    at, of = rank(), size()
    return Share(count * at // of, count * (at + 1) // of, -(-count // of))


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds, sharing its memory; any other tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)  # of a DTensor; its class is not imported for runs without any
    return tensor if part is None else part


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, in every process, all of which have to ask for it; any other tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return full


@torch.no_grad()
def agree_on_buffers(model: nn.Module) -> None:
    """Gives all processes the same buffers: running statistics averaged over them, others the first one's.

    Each process's batch-norm normalises by its own share of the batch, and so its running statistics are of that share;
    those of an instance-norm are of the samples of it.
    """
    if size() == 1:
        return
    for module in model.modules():
        averaged = keeps_statistics(module)
        for name, buffer in module.named_buffers(recurse=False):
            if averaged and name in ("running_mean", "running_var"):
                buffer.copy_(total(buffer) / size())
            elif buffer.layout is not torch.strided:
                continue  # sparse ones are constants: no operator writes over them
            elif buffer.is_contiguous():
                dist.broadcast(buffer, 0)
            else:
                _broadcast(buffer)


def _broadcast(buffer: Tensor) -> None:
    """Of a buffer whose memory has gaps or repeats, its values; constants of that kind cannot be written."""
    dist.broadcast(values := buffer.contiguous(), 0)
    if not torch.equal(values, buffer):
        buffer.copy_(values)
