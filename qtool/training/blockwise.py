"""8-bit AdamW and Lion on the CPU: bitsandbytes' states and update, a piece that stays in the caches at a time.

A state holds for each weight a code c of 8 bits, and for each 256 neighbours a scale s: its moment is s·q[c] with a
book q of 256 values (arXiv 2110.02861). A step takes moments out of their codes, moves them and the weights, and puts
them back: s = max |m|, and c the nearest in the book to m/s, the number of midpoints (q[i]+q[i+1])/2 below it.

On a GPU bitsandbytes does that in one kernel. Its CPU path goes over a whole weight twenty times, each time through
memory, and half of its time is the search for codes, which is coarse for small moments. Here a piece goes through all
of it before the next one, and a code is looked up: the upper 20 bits of m/s name a cell, and a table has the code that
is nearest to its centre, and so to all of it unless a midpoint is within 1/4096 of m. A positive second moment gets a
positive code, since a step divides by its root.

Left out on purpose: bitsandbytes' other optimizers, and 32-bit states of small weights, which stay with it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.training.block_states import BLOCK

PIECE = 2**18
"""Values that go through an update together, for each thread."""
CUT = 12
"""Bits of a moment that its code does not depend on: a cell is 1/2048 of it at most."""
_CELLS = 2 ** (32 - CUT)


def on_cpu(kind: Any) -> Any:
    """``kind``, bitsandbytes' 8-bit AdamW or Lion, which updates weights on the CPU by :func:`update`."""

    class OnCpu(kind):  # type: ignore[misc]
        @torch.no_grad()
        def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            state = self.state[p]
            if p.device.type != "cpu" or state["state1"].dtype != torch.uint8:
                super().update_step(group, p, gindex, pindex)
                return
            p.data, p.grad = p.data.contiguous(), p.grad.contiguous()
            state["step"] += 1
            config = self.get_config(gindex, pindex, group)
            books = [state[key] for key in ("qmap1", "qmap2") if state.get(key) is not None]
            for key in ("state1", "state2")[: len(books)]:
                state[key] = state[key].contiguous()
            codes = [state[f"state{i + 1}"] for i in range(len(books))]
            scales = [state[f"absmax{i + 1}"] for i in range(len(books))]
            beta1, beta2 = config["betas"][:2]
            numbers = (beta1, beta2, config["eps"], state["step"], config["lr"], config["weight_decay"])
            torch.ops.qtool.update_8bit(p, p.grad, codes, scales, books, *numbers)

    return OnCpu


@torch.library.custom_op("qtool::update_8bit", mutates_args=("weight", "codes", "scales"))
def update(
    weight: Tensor, grad: Tensor, codes: list[Tensor], scales: list[Tensor], books: list[Tensor], beta1: float,
    beta2: float, eps: float, step: int, rate: float, decay: float,
) -> None:  # fmt: skip
    """One step of AdamW (two moments) or Lion (one) in place; any shape, contiguous, weight and grad of any width."""
    weight, grad, codes = weight.view(-1), grad.view(-1), [c.view(-1) for c in codes]
    piece = PIECE * torch.get_num_threads()
    tables = [_table(book.numpy().tobytes()) for book in books]
    for start in range(0, weight.numel(), piece):
        part = slice(start, min(start + piece, weight.numel()))
        blocks = slice(start // BLOCK, -(-part.stop // BLOCK))
        moments = [
            torch.ops.bitsandbytes.dequantize_blockwise(c[part], s[blocks], book, BLOCK, torch.float32)
            for c, s, book in zip(codes, scales, books, strict=True)
        ]
        wide, slope = weight[part].float(), grad[part].float()
        if len(moments) == 2:
            _adamw(wide, slope, moments[0], moments[1], beta1, beta2, eps, step, rate, decay)
        else:
            _lion(wide, slope, moments[0], beta1, beta2, rate, decay)
        if wide.dtype != weight.dtype:
            weight[part] = wide
        for moment, c, s, table in zip(moments, codes, scales, tables, strict=True):
            _put_back(moment, c[part], s[blocks], table)


@update.register_fake
def _(*args: Any) -> None:
    return None


def _adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, eps: float, step: int, rate: float,
    decay: float,
) -> None:  # fmt: skip
    """m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g²; w ← (1-ηλ)w - η m̂/(√v̂ + ε), with m̂ = m/(1-β₁ᵗ), v̂ = v/(1-β₂ᵗ)."""
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    w.mul_(1 - rate * decay).addcdiv_(m, root, value=-rate / (1 - beta1**step))


def _lion(w: Tensor, g: Tensor, m: Tensor, beta1: float, beta2: float, rate: float, decay: float) -> None:
    """w ← (1-ηλ)w - η sign(β₁m + (1-β₁)g); m ← β₂m + (1-β₂)g (arXiv 2302.06675)."""
    w.mul_(1 - rate * decay).add_((m * beta1).add_(g, alpha=1 - beta1).sign_(), alpha=-rate)
    m.mul_(beta2).add_(g, alpha=1 - beta2)


def _put_back(moment: Tensor, codes: Tensor, scales: Tensor, nearest: Tensor) -> None:
    """Moments into codes and scales; what they hold is lost."""
    whole = moment.numel() // BLOCK * BLOCK
    for part, of in ((moment[:whole].view(-1, BLOCK), scales[: whole // BLOCK]), (moment[None, whole:], scales[-1:])):
        if part.numel():
            torch.amax(part.abs(), 1, out=of)
            part /= of.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    cell = torch.bitwise_right_shift(moment.view(torch.int32), CUT).add_(_CELLS // 2)
    torch.index_select(nearest, 0, cell, out=codes)


@functools.lru_cache(8)
def _table(book: bytes) -> Tensor:
    """The code (uint8) nearest to each cell of float32 numbers, by their bits without the last ``CUT`` of them."""
    values = np.frombuffer(book, np.float32)
    bits = (np.arange(-_CELLS // 2, _CELLS // 2, dtype=np.int32) << CUT) + (1 << CUT - 1)
    centre = bits.view(np.float32)
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, centre).clip(0, len(values) - 1)
    if values[0] == 0:
        codes = np.where(bits > 1 << CUT, np.maximum(codes, 1), codes)
    return torch.from_numpy(codes.astype(np.uint8))
