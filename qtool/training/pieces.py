"""How much of a model an update takes at a time, where it is made piece by piece: one bound for all who cut.

``rounding`` widens 16-bit weights for their update, and ``step_in_backward`` lets gradients wait until together they
are worth one. Either way a piece is memory, four bytes a value in each of its float32 copies, and an update of its own
costs the launches of a dozen kernels. So a piece is a few million values, and more on a GPU, where launches count: a
block of a large transformer. Of a small model it is a part, since more would be no saving.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

PIECE = {"cpu": 4 * 2**20, "cuda": 12 * 2**20}
"""Values in a piece, by the kind of device."""
SPARE = 2**20
"""What is waited for until it is a piece ends in a weight that goes beyond it. Whoever takes it in one has room for so
much more."""
SHARE = 16
"""That part of a model is a piece, where it is less."""


LATE = {"cpu": 1, "cuda": 2}
"""Pieces that are one in the backward pass, once a quarter of the model is updated: its activations are free then."""


def piece(parameters: Sequence[Tensor], spare: int = 0) -> int:
    """The number of values in a piece of a model of ``parameters``; ``spare`` are added to what is usual there."""
    return min(PIECE[_kind(parameters)] + spare, sum(p.numel() for p in parameters) // SHARE)


def late(parameters: Sequence[Tensor]) -> int:
    """How many pieces are one, late in a backward pass."""
    return LATE[_kind(parameters)]


def _kind(parameters: Sequence[Tensor]) -> str:
    return "cuda" if parameters[0].device.type == "cuda" else "cpu"
