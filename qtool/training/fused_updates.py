"""8-bit AdamW of bfloat16 weights on a GPU in one pass through memory.

Widened to float32, updated and rounded, a weight goes through memory many times over. In bytes, read and written:

====================================================  ==============================================
widening: weight and gradient, 2 → 4 each             12
bitsandbytes: weight 4 + 4, gradient 4, codes 2 + 2   16, and scales, 8 bytes each way per 256 weights
rounding: clamp 8, draw 2, add 10, cut 8              28
back: 4 → 2                                            6
====================================================  ==============================================

Together 62. Here one kernel reads weight, gradient and codes (2 + 2 + 2) and writes weight and codes (2 + 2): 10, and
the scales, and there are no float32 copies, which for a piece of 13 million weights are 100 MB. So a parameter need
not wait for others either: each is updated as soon as its gradient is there.

A step is blockwise's (:mod:`qtool.training.blockwise`), in float32: m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g²,
w ← (1-ηλ)w - η m̂/(√v̂ + ε), with moments out of bitsandbytes' codes and back into the nearest ones; bitsandbytes' own
CUDA kernel decays weights after the update, which is (1-ηλ) of it then. As there, a gradient that is not finite
leaves its weight alone and its moments zero. The weight is rounded stochastically (16 random bits are added below the
cut, E[round(w)] = w), or to nearest with what that took away kept (``rounding``). Codes, scales and their places are
bitsandbytes', so a checkpoint of either way goes on with the other.

The kernel needs Triton, which torch's CUDA builds bring, and Triton a C compiler. Before it is used it has to agree
with bitsandbytes on the device at hand (:func:`refusal`); else weights are widened, and a warning says so.

Left out on purpose: Lion, paged states, 32-bit states, float16, weights that are not contiguous.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qtool.errors import QtoolWarning, reason_of
from qtool.system.devices import current
from qtool.training.block_states import BLOCK
from qtool.training.blockwise import on_cpu

ROWS = 4
"""Blocks in a program, and its warps: compiled for an H100 60 registers a thread, none spilled, and nothing but scales
through shared memory."""
CELL = 16
"""Bits of a relative moment that do not name its cell."""
TRIED = 5008
"""Values that both ways are compared on: 19 blocks and a part of one, 4 programs and a part of one. They are a multiple
of 16, as nearly all weights are: Triton compiles another kernel for the others."""
RATE = 0.002
"""The learning rate there, at which decay and update are a part of a step of bfloat16 each."""


def usable(inner: Any, parameters: list[nn.Parameter]) -> bool:
    """Whether the 8-bit states of ``inner``, an optimizer, are those of AdamW and can be updated here.

    Of fake parameters it is the device and an installed Triton that decide, as for a real run that nothing refuses.
    """
    device = parameters[0].device
    if device.type != "cuda" or getattr(inner, "optimizer_name", None) != "adam" or inner.is_paged:
        return False
    if isinstance(parameters[0], FakeTensor):
        return _has_triton()
    if (reason := refusal(device)) is not None:
        warnings.warn(
            f"the fused update of 8-bit states is not used: {reason}; weights are updated in float32 copies, which "
            "takes longer and more memory",
            QtoolWarning,
            stacklevel=2,
        )
    return reason is None


def fits(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether a parameter with that state of bitsandbytes' is one that :func:`step` can update."""
    narrow = parameter.dtype == torch.bfloat16 and parameter.is_contiguous()
    return narrow and "state2" in state and state["state1"].dtype == torch.uint8


def step(
    parameter: Tensor, group: dict[str, Any], state: dict[str, Any], kept: Tensor | None,
    draw: Callable[[], int] | None,
) -> None:  # fmt: skip
    """Updates a parameter by its gradient, and ``state`` with it.

    ``kept`` is its compensation (bfloat16), if any; ``draw`` gives the seed of a stochastic rounding, if it is one.
    """
    assert parameter.grad is not None
    state["step"] += 1
    grad = parameter.grad.contiguous()
    if isinstance(parameter, FakeTensor):
        return  # for which the kernel allocates nothing
    beta1, beta2 = group["betas"][:2]
    update(
        parameter, grad, [state["state1"], state["state2"]], [state["absmax1"], state["absmax2"]],
        [] if kept is None else [kept], draw() if draw else None, beta1, beta2, group["eps"], state["step"],
        group["lr"], group["weight_decay"],
    )  # fmt: skip


def update(
    weight: Tensor, grad: Tensor, codes: list[Tensor], scales: list[Tensor], kept: list[Tensor], seed: int | None,
    beta1: float, beta2: float, eps: float, step: int, rate: float, decay: float,
) -> None:  # fmt: skip
    """One step of AdamW in place; any shape, contiguous, the weight in bfloat16. It rounds to nearest without a seed.

    No operator of torch's: what ``torch.library`` does for one takes the host three tenths of a millisecond, a hundred
    times in a step.
    """
    count, device = weight.numel(), weight.device
    constants = (seed is not None, bool(kept), ROWS)
    aligned = [tensor.data_ptr() % 16 for tensor in (weight, grad, *codes, *kept)]
    _launch(
        (device, *constants, *aligned, count % 16 == 0, count < 2**31), -(-count // (ROWS * BLOCK)),
        weight, grad, *codes, *scales, kept[0] if kept else weight, *_tables(device), count, seed or 0,
        beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - rate * decay, rate / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step), *constants,
    )  # fmt: skip


_made: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by what Triton compiles for: the device, constants, and what is a multiple of 16."""


def _launch(key: tuple[Any, ...], programs: int, *arguments: Any) -> None:
    """So many programs of the kernel for ``key``, which begins with the device.

    On an H100's host Triton takes a tenth of a millisecond to look at all arguments, which is as long as the kernel
    takes for 12 million weights: a kernel that is known is launched as it is.
    """
    from qtool.training import fused_kernel

    with current(key[0]):
        if (kernel := _made.get(key)) is not None:
            kernel[(programs, 1, 1)](*arguments)
            return
        made = fused_kernel.adamw[(programs,)](*arguments, num_warps=ROWS, enable_fp_fusion=True)
        if torch.version.hip is None:  # for which Triton looks at sizes too
            _made[key] = made


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first moment and the second: books (2, 256), midpoints (2, 256), lowest codes in cells (2, 65,536)."""
    from bitsandbytes.functional import create_dynamic_map

    books = [create_dynamic_map(signed=signed) for signed in (True, False)]
    tables = [cells(book) for book in books]
    midpoints, lowest = zip(*tables, strict=True)
    return torch.stack(books).to(device), torch.stack(midpoints).to(device), torch.stack(lowest).to(device)


def cells(book: Tensor) -> tuple[Tensor, Tensor]:
    """book (256, ascending) → midpoints (256, float32), the last one infinite, and lowest codes (65,536, uint8).

    A number of cell i (its upper 16 bits) has the code c = lowest[i], or c + 1 if it is above midpoints[c]. A positive
    number's code is positive where the book begins with zero, as the second moment's. Raises ValueError for a book
    that has two midpoints in one cell.
    """
    midpoints = torch.cat([(book[1:] + book[:-1]) / 2, torch.tensor([math.inf])])
    if book[0] == 0:
        midpoints[0] = 0
    bits = torch.arange(-(2**31), 2**31, 1 << CELL).to(torch.int32)
    ends = torch.stack([bits, bits | (1 << CELL) - 1]).view(torch.float32)
    ends = torch.where(ends.isnan(), torch.tensor(math.inf).copysign(ends), ends).sort(0).values
    low, high = torch.bucketize(ends, midpoints[:-1])
    if (high - low > 1).any():
        raise ValueError("two midpoints of the book in one cell")
    return midpoints, low.to(torch.uint8).roll(1 << CELL - 1)


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Why updates are not fused on that device; None where they agree with bitsandbytes'. Generators are left alone."""
    if not _has_triton():
        return "no module 'triton'"
    try:
        with torch.random.fork_rng(devices=[]):
            return disagreement(device)
    except Exception as error:  # whatever Triton, its compiler or the device raises
        return reason_of(error)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.no_grad()
def disagreement(device: torch.device) -> str | None:
    """What differs between updates here and bitsandbytes' of float32 weights, three steps long; None: nothing does.

    Scales may differ by 1e-4 of themselves, 2 % of the codes by one, and 3 % of the rounded weights by a step of
    bfloat16: bitsandbytes' kernel decays later, and takes powers of β and quotients approximately. Rounded
    stochastically, weights are neighbours of the exact ones, often the other than the nearest, and right on average.
    """
    from bitsandbytes.optim import AdamW8bit

    draw = torch.Generator().manual_seed(0)
    wide = nn.Parameter(torch.randn(TRIED, generator=draw).bfloat16().float().to(device), requires_grad=False)
    theirs = on_cpu(AdamW8bit)([wide], lr=RATE, weight_decay=1.5)
    group = theirs.param_groups[0]
    theirs.init_state(group, wide, 0, 0)
    for _ in range(3):
        grad = torch.randn(TRIED, generator=draw) * torch.randn(TRIED, generator=draw).exp()
        wide.grad = grad.bfloat16().float().to(device)
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in theirs.state[wide].items()}
        other = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        ours, drawn = (nn.Parameter(wide.bfloat16(), requires_grad=False) for _ in range(2))
        ours.grad = drawn.grad = wide.grad.bfloat16()
        kept = torch.zeros_like(ours)
        step(ours, group, state, kept, None)
        step(drawn, group, other, None, lambda: int(torch.randint(2**31, (), generator=draw)))
        theirs.step()
        if found := _states_differ(state, theirs.state[wide]) or _weights_differ(ours, kept, drawn, wide):
            return found
        wide.copy_(wide.bfloat16())
    return None


def _states_differ(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for i in "12":
        if not torch.allclose(ours[f"absmax{i}"], theirs[f"absmax{i}"], rtol=1e-4, atol=0.0):
            return f"scales of moment {i} differ from bitsandbytes'"
        least = int(i == "2")  # bitsandbytes' CUDA kernel gives tiny second moments the code zero
        codes = [s[f"state{i}"].int().clamp_min(least) for s in (ours, theirs)]
        apart = (codes[0] - codes[1]).abs()
        if (apart > 1).any() or (apart > 0).float().mean() > 0.02:
            return f"codes of moment {i} differ from bitsandbytes'"
    return None


def _weights_differ(ours: Tensor, kept: Tensor, drawn: Tensor, exact: Tensor) -> str | None:
    nearest = exact.bfloat16()
    apart = 0.01 * RATE  # how far updates themselves differ
    room = exact.abs() * 2**-7 + apart  # a step of bfloat16, or two
    if ((ours - nearest).abs() > room).any() or (ours != nearest).float().mean() > 0.03:
        return "weights differ from bitsandbytes'"
    if not ((ours.float() + kept - exact).abs() <= exact.abs() * 2**-12 + apart).all():
        return "what rounding takes away is not kept"
    away = (drawn - exact) / room
    if not (away.abs() <= 1).all() or away.mean().abs() > 0.05 or (drawn != nearest).float().mean() < 0.1:
        return "weights are not rounded stochastically"
    return None
