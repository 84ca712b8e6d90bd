"""The operator for images of bytes against its formula in numpy, on tensors and on shapes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qtool.graphs.pixels import PIXELS

SHAPE = (2, 3, 5, 4)


def numbers(*columns: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(column).reshape(3, 1, 1) for column in columns]


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
@pytest.mark.parametrize("inside", [None, 12.0])
def test_it_rounds_by_channel_and_puts_one_more_to_these(inside: float | None, kind: torch.dtype) -> None:
    x = (100 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))).to(kind)
    parts = numbers([0.1, 0.02, 0.5], [3.0, -1.0, 0.0], [0.0, 0.01, 0.2])
    scale, zero_point, shift = (part.numpy() for part in parts)
    expected = np.round((x.numpy().astype(np.float32) + shift) / scale) + zero_point
    if inside is not None:
        expected = np.concatenate([expected, np.full((2, 1, 5, 4), inside, np.float32)], axis=1)
    np.testing.assert_array_equal(PIXELS(x, *parts, inside).numpy(), expected)
    made = PIXELS(x.to("meta"), *(part.to("meta") for part in parts), inside)
    assert (made.shape, made.dtype) == (expected.shape, torch.float32)
    torch.library.opcheck(PIXELS, (x, *parts, inside))
