"""How long a training step takes, estimated before it runs: what it computes, over what the device was measured to do.

A prediction sees every operator of a step (``qtool.memory.predict``), and counts three things as it does: operators
that are launched, floating-point operations of products and convolutions, and bytes that the other operators read and
write. Of a device three rates are measured, in a fraction of a second: how long it is from one launch to the next in a
small network, products in each format, and a copy. A pass over one micro-batch then takes

    t = max(launches·ℓ, flops/φ + bytes/β) on a GPU, which works while the host launches,
    t = launches·ℓ + flops/φ + bytes/β     on a CPU;

micro-batches are m such passes over a part of the samples each, and the update comes on top. So a GPU that waits for
its host at 16 samples gains nothing from passes over four, and recomputing activations is cheaper there; and on a CPU
small micro-batches cost little. Autocast launches 1.7 times as many operators (a ViT's, counted), and moves as many
bytes, since it casts what it narrows. Weights in 16 bits are taken for as fast as autocast and no faster: they are
there for memory.

This orders choices. It is no promise: products of a network's own shapes are slower than those that are measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from qtool.nested import tensors
from qtool.recipe import TrainConfig

CASTS = 1.7
"""Operators under autocast, over those without."""
_FORMATS = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
_LIKE = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators without a formula, and those that compute the same."""
_REPEATS = 8


@dataclass
class Work:
    """What operators do: how many there are, floating-point operations of products, bytes moved by all others."""

    launches: float = 0
    flops: float = 0
    num_bytes: float = 0

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds one operator. Views, of which nothing runs on a device, are none."""
        if func.is_view or func.namespace != "aten":
            return
        self.launches += 1
        flops = _flops(func, args, kwargs, result)
        self.flops += flops or 0
        if flops is None:
            self.num_bytes += sum(tensor.nbytes for tensor in tensors((args, kwargs, result)))

    def __add__(self, other: Work) -> Work:
        return Work(self.launches + other.launches, self.flops + other.flops, self.num_bytes + other.num_bytes)

    def __rmul__(self, factor: float) -> Work:
        return Work(factor * self.launches, factor * self.flops, factor * self.num_bytes)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Floating-point operations; None of an operator that torch has no formula for.

    Of a convolution as many for each gradient of input and weight as forward, where torch's formula forgets the groups.
    """
    if func.overloadpacket is torch.ops.aten.convolution_backward:
        gradient, value, weight = (list(tensor.shape) for tensor in args[:3])
        once: int = conv_flop_count(value, weight, gradient, args[7])
        return once * (int(args[10][0]) + int(args[10][1]))
    formula = flop_registry.get(_LIKE.get(func.overloadpacket, func.overloadpacket))
    try:
        return None if formula is None else int(formula(*args, **kwargs or {}, out_val=result))
    except AssertionError:  # shapes that it does not know: before torch 2.13 keys that several heads share
        return None


@dataclass
class StepWork:
    """The work of a step: forward and backward passes over so many micro-batches, and the update."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    update: Work = field(default_factory=Work)
    passes: int = 0


@dataclass(frozen=True)
class Rates:
    """What a device does: seconds from launch to launch, products per second by format, bytes moved per second."""

    launch: float
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    gpu: bool

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """How long ``work`` takes with products in ``dtype``."""
        host, device = work.launches * self.launch, work.flops / self.flops[dtype] + work.num_bytes / self.bandwidth
        return max(host, device) if self.gpu else host + device


def product_dtype(precision: str) -> torch.dtype:
    """The format of a precision's matrix products."""
    return _FORMATS[precision.partition("-")[0]]


def step_seconds(config: TrainConfig, base: TrainConfig, work: StepWork, rates: Rates) -> float:
    """The time of a step by ``config``, which is ``base`` with other micro-batches, precision or checkpointing.

    ``work`` is that of a step by ``base``.
    """
    again = 2 if config.activation_checkpointing and not base.activation_checkpointing else 1
    casts = CASTS if config.precision != base.precision else 1.0
    share = base.micro_batches / config.micro_batches
    total, dtype = again * work.forward + work.backward, product_dtype(config.precision)
    part = Work(casts * total.launches, share * total.flops, share * total.num_bytes)
    passes = rates.seconds(part, dtype) * config.micro_batches / work.passes
    return passes + rates.seconds(work.update, dtype)


def measure(device: torch.device, precisions: Iterable[str]) -> Rates:
    """The rates of a device for steps in ``precisions`` and in 32 bits, each the best of a few measurements.

    On a CPU no 16-bit format is taken for faster than float32: products are, where it has instructions for them, and
    much else is not.
    """
    gpu = device.type == "cuda"
    flops, size = {}, 2048 if gpu else 512
    for dtype in {torch.float32, *map(product_dtype, precisions)}:
        a = torch.ones(size, size, dtype=dtype, device=device)
        flops[dtype] = 2 * size**3 / _timed(functools.partial(torch.mm, a, a), device)
    if not gpu:
        flops = {dtype: min(rate, flops[torch.float32]) for dtype, rate in flops.items()}
    block = torch.ones(2**24 if gpu else 2**22, device=device)
    bandwidth = 2 * block.nbytes / _timed(block.clone, device)
    del a, block
    if gpu:
        torch.cuda.empty_cache()  # others may be about to train there
    return Rates(_launch(device), flops, bandwidth, gpu)


def _launch(device: torch.device) -> float:
    """Seconds for each operator of a small network's forward and backward pass."""
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8)]
    network, value = nn.Sequential(*layers).to(device), torch.ones(2, 8, device=device)

    def step() -> None:
        with torch.enable_grad():
            network(value).sum().backward()

    with _Counting() as counting:
        step()
    return _timed(step, device) / float(counting.work.launches)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of what runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.work.count(func, args, kwargs, result)
        return result


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """The least of a few durations of ``run``, which a busy machine lengthens; on a GPU of ten runs in a row each."""
    found, times = [], 10 if device.type == "cuda" else 1
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(times):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) / times)
    return min(found)
