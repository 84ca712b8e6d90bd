"""The operator for images of bytes against its formula in numpy, on tensors and on shapes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qtool.pixels import PIXELS

SHAPE = (2, 3, 5, 4)


def numbers(*columns: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(column).reshape(3, 1, 1) for column in columns]


@pytest.mark.parametrize("padding", [[], [1, 1, 2, 2], [0, 1, 2, 0]])
def test_it_pads_and_rounds_by_channel(padding: list[int]) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    parts = numbers([0.1, 0.02, 0.5], [3.0, -1.0, 0.0], [0.0, 0.01, 0.2])
    left, right, top, bottom = padding or [0] * 4
    wide = np.pad(x.numpy(), [(0, 0), (0, 0), (top, bottom), (left, right)])
    scale, zero_point, shift = (part.numpy() for part in parts)
    expected = np.round((wide + shift) / scale) + zero_point
    np.testing.assert_array_equal(PIXELS(x, *parts, padding).numpy(), expected)
    assert PIXELS(x.to("meta"), *(part.to("meta") for part in parts), padding).shape == expected.shape
    torch.library.opcheck(PIXELS, (x, *parts, padding))
