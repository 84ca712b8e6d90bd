"""8-bit optimizer states on another number of processes: what can be kept is kept, the rest is quantized again.

An 8-bit state holds codes c, one per weight, and one scale s per block of 256 neighbours; a weight's moment
is s·q[c] with a code book q of 256 values (arXiv 2110.02861). Blocks are counted from the beginning of a
process's part. Cut for another number of processes, a part begins elsewhere, and its blocks straddle
the old ones: their moments are taken out of the old blocks, and quantized again with the new blocks'
scales, s = max |m|, to the nearest value of the book. That rounds once more, by up to half a step of the
book; a block whose ends have not moved keeps codes and scale, bit for bit. A part that is too small for 8 bits
(fewer than 4,096 values) has 32-bit moments, and a weight whose parts all had them keeps them.

A part is a range of the flattened weight, since weights are cut along their first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.system import processes

BLOCK = 256
SMALLEST = 4096
BITSANDBYTES = {"state1": True, "state2": False}
"""bitsandbytes' moments: codes or 32-bit values, beside ``absmax`` and ``qmap`` of the same number; is it signed?"""
TORCHAO = {"exp_avg": True, "exp_avg_sq": False}
"""torchao's moments: a tensor class that holds codes, scales and book."""


@dataclass(frozen=True)
class Piece:
    """A moment of the range of weights that begins at ``start``: values (n, float32), or codes with scales and book."""

    start: int
    values: Tensor
    codes: Tensor | None = None
    scales: Tensor | None = None
    book: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def dequantize(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    """codes (n, uint8), scales (⌈n/256⌉, float32), book (256, float32) → moments (n, float32)."""
    return book[codes.int()] * scales.repeat_interleave(BLOCK)[: codes.numel()]


def quantize(values: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """The reverse: moments (n, float32) → codes (n, uint8) of the nearest values of the book, and scales.

    A positive second moment gets a positive value: a step divides by its root.
    """
    count = -(-values.numel() // BLOCK)
    padded = torch.zeros(count * BLOCK, dtype=torch.float32, device=values.device)
    padded[: values.numel()] = values
    scales = padded.view(count, BLOCK).abs().amax(1)
    relative = padded.view(count, BLOCK) / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(relative, (book[1:] + book[:-1]) / 2).to(torch.uint8)
    if not book[0]:
        codes = torch.where(relative > 0, codes.clamp_min(1), codes)
    return codes.view(-1)[: values.numel()], scales


def cut_anew(trees: list[Mapping[str, Any]], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """The optimizer state of this process's parts, from those of all old processes, in order of rank.

    ``trees`` are what the optimizers gave as their ``state_dict`` then; ``parameters`` are sharded as they are now.
    """
    first = trees[0]
    inner = [key for key, value in first.items() if isinstance(value, Mapping) and key != "state"]
    new = {**first, **{key: cut_anew([t[key] for t in trees], parameters) for key in inner}}
    if "state" in first:
        indices = sorted({index for tree in trees for index in tree["state"]})
        states = {i: _state([_flat(t["state"].get(i, {})) for t in trees], parameters[i]) for i in indices}
        new["state"] = {index: state for index, state in states.items() if state}
    return new


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with what bitsandbytes puts into a table of its own put back into it."""
    inner = [value for value in state.values() if isinstance(value, Mapping)]
    return {k: v for part in (state, *inner) for k, v in part.items() if not isinstance(v, Mapping)}


def _state(olds: list[Mapping[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    """One parameter's state; empty where this process has no part of it."""
    part = processes.local(parameter)
    if not part.numel():
        return {}
    row = parameter.numel() // parameter.shape[0]
    starts = [_first_row(parameter.shape[0], rank, len(olds)) * row for rank in range(len(olds))]
    at = _first_row(parameter.shape[0], processes.rank(), processes.size()) * row
    new: dict[str, Any] = {}
    for key, value in next(old for old in olds if old).items():
        if key.startswith(("absmax", "qmap")):
            continue
        if key in BITSANDBYTES or key in TORCHAO:
            pieces = [_piece(old, key, start) for old, start in zip(olds, starts, strict=True) if old]
            new |= _moment(key, pieces, at, part)
        elif isinstance(value, Tensor) and value.dim():
            new[key] = torch.cat([old[key].flatten() for old in olds if old])[at : at + part.numel()].view(part.shape)
        else:
            new[key] = value
    return new


def _first_row(rows: int, rank: int, world: int) -> int:
    """Where a process's part begins: parts have ⌈rows/world⌉ rows, the last ones fewer or none."""
    return min(rows, rank * -(-rows // world))


def _piece(old: Mapping[str, Any], key: str, start: int) -> Piece:
    value = old[key]
    if key in TORCHAO and hasattr(value, "codes"):
        codes, scales, book = value.codes.flatten(), value.scale, value.qmap
    elif value.dtype == torch.uint8:
        codes, scales, book = value.flatten(), old[f"absmax{key[-1]}"], old[f"qmap{key[-1]}"]
    else:
        return Piece(start, value.flatten())
    return Piece(start, dequantize(codes, scales, book), codes, scales, book)


def _moment(key: str, pieces: list[Piece], at: int, part: Tensor) -> dict[str, Any]:
    """The entries of a state that hold one moment of ``part``, which begins at ``at``, in the library's own form."""
    stop, signed = at + part.numel(), (BITSANDBYTES | TORCHAO)[key]
    values = torch.cat([piece.values for piece in pieces])[at:stop]
    whole_blocks = key in BITSANDBYTES or part.numel() % BLOCK == 0
    book = next((piece.book for piece in pieces if piece.book is not None), None)
    if book is None or part.numel() < SMALLEST or not whole_blocks:
        return {key: values.view(part.shape)}
    codes, scales = quantize(values, book)
    for piece in pieces:
        _keep(piece, at, stop, codes, scales)
    return _in_form(key, codes.view(part.shape), scales, book, signed)


def _keep(piece: Piece, start: int, stop: int, codes: Tensor, scales: Tensor) -> None:
    """Copies the blocks whose ends are the same in the old part and in the new one (``start`` … ``stop``)."""
    if piece.codes is None or piece.scales is None or (piece.start - start) % BLOCK:
        return
    low, high = max(start, piece.start), min(stop, piece.stop)
    if stop != piece.stop:
        high = low + (high - low) // BLOCK * BLOCK
    if high <= low:
        return
    codes[low - start : high - start] = piece.codes[low - piece.start : high - piece.start]
    count = -(-(high - low) // BLOCK)
    there, here = (low - piece.start) // BLOCK, (low - start) // BLOCK
    scales[here : here + count] = piece.scales[there : there + count]


def _in_form(key: str, codes: Tensor, scales: Tensor, book: Tensor, signed: bool) -> dict[str, Any]:
    if key in BITSANDBYTES:
        return {key: codes, f"absmax{key[-1]}": scales, f"qmap{key[-1]}": book}
    from torchao.optim.subclass_8bit import OptimState8bit

    return {key: OptimState8bit(codes, scales, book, signed, torch.float32)}
