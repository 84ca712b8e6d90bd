"""A piece is a part of a small model, and of a large one what its device makes it."""

from __future__ import annotations

import pytest
import torch

from qtool.training.pieces import SPARE, piece


@pytest.mark.parametrize(
    ("values", "spare", "expected"), [(3200, SPARE, 200), (2**30, 0, 2**22), (2**30, 7, 2**22 + 7)]
)
def test_a_piece(values: int, spare: int, expected: int) -> None:
    parameters = [torch.empty(values // 4, device="meta")] * 4
    assert piece(parameters, spare) == expected
