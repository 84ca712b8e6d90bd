"""``qtool::pixels``: an image whose numbers stand for bytes, as these bytes, each channel with its own scale.

A data pipeline makes ``x_c = (p / 255 − mean_c) / std_c`` of a byte ``p``. One scale and zero point for all channels
round that to other numbers than it can be; one of each for every channel gives the bytes back, and nothing is rounded:

    u_c = round((x_c + h_c) / s_c) + z_c,

``s`` the step of a channel, ``h`` a fraction of it that keeps halves away from the rounding, ``z`` whole numbers. One
channel more may hold the same whole number everywhere: a convolution that pads with zeros tells by it where the image
is. A runtime quantizes by channel so, at no cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 256
ZERO = "pixels_zero"
"""Under what the operator's node has the zero point of the quantizer behind it, in its ``meta``."""


@torch.library.custom_op(
    "qtool::pixels", mutates_args=(),
    schema="(Tensor x, Tensor scale, Tensor zero_point, Tensor shift, float? inside) -> Tensor",
)  # fmt: skip
def pixels(x: Tensor, scale: Tensor, zero_point: Tensor, shift: Tensor, inside: float | None) -> Tensor:
    """Whole numbers in float32, N × C × sizes; not clipped to any range, which the quantizer behind it does.

    ``x`` is of any type, ``scale``, ``zero_point`` and ``shift`` are C × 1 × … each. ``inside`` is what one channel
    more is full of.
    """
    whole = ((x.float() + shift) / scale).round() + zero_point
    return whole if inside is None else _with_channel(whole, inside)


@pixels.register_fake
def _shape(x: Tensor, scale: Tensor, zero_point: Tensor, shift: Tensor, inside: float | None) -> Tensor:
    whole = torch.empty_like(x, dtype=torch.float32)
    return whole if inside is None else _with_channel(whole, inside)


def _with_channel(x: Tensor, value: float) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :1], value)], 1)


PIXELS = torch.ops.qtool.pixels.default
