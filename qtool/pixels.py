"""``qtool::pixels``: an image whose numbers stand for bytes, as these bytes, each channel with its own scale.

A data pipeline makes ``x_c = (p / 255 − mean_c) / std_c`` of a byte ``p``. One scale and zero point for all channels
round that to other numbers than it can be; one of each for every channel gives the bytes back, and nothing is rounded:

    u_c = round((x_c + h_c) / s_c) + z_c,

``s`` the step of a channel, ``h`` a fraction of it that keeps halves away from the rounding, ``z`` whole numbers. The
image is padded with zeros first. A runtime quantizes by channel so, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEVELS = 256
ZERO = "pixels_zero"
"""Under what the operator's node has the zero point of the quantizer behind it, in its ``meta``."""


@torch.library.custom_op(
    "qtool::pixels", mutates_args=(),
    schema="(Tensor x, Tensor scale, Tensor zero_point, Tensor shift, int[] padding) -> Tensor",
)  # fmt: skip
def pixels(x: Tensor, scale: Tensor, zero_point: Tensor, shift: Tensor, padding: Sequence[int]) -> Tensor:
    """Whole numbers in float32, N × C × sizes; not clipped to any range, which the quantizer behind it does.

    ``scale``, ``zero_point`` and ``shift`` are C × 1 × … each; ``padding`` is ``aten::constant_pad_nd``'s.
    """
    padded = torch.nn.functional.pad(x, list(padding)) if any(padding) else x
    return ((padded + shift) / scale).round() + zero_point


@pixels.register_fake
def _shape(x: Tensor, scale: Tensor, zero_point: Tensor, shift: Tensor, padding: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(x, list(padding)) if any(padding) else torch.empty_like(x)


PIXELS = torch.ops.qtool.pixels.default
