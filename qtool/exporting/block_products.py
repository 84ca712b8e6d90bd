"""Products of stored integers and inputs that are rounded as they come: ONNX Runtime's MatMulNBits.

Weights of 4 or 8 bits stay as they are stored, and each row ``x`` of inputs is cut into blocks of 32 (or of the group
that shares a scale), each rounded to 8 bits by its own greatest magnitude:

    a = max |x_block| / 127,    x̂ = a · round(x_block / a),    y = Σ_blocks a · s · Σ (x / a) · q

The inner sums are exact in integers, the outer ones float32. So the layer is what the quantized graph says of the
weights, with inputs of some 45 dB. The kernels do so at accuracy level 4, which the runtime chooses by itself; with the
session option ``session.qdq_matmulnbits_accuracy_level=1`` inputs stay float32, and a layer takes as long as in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from qtool.form import BLOCK

_MOST = 127


def from_blocks(
    stored: Sequence[npt.NDArray[Any]], block_size: int, axis: int = 1, **_: Any
) -> npt.NDArray[np.float32]:
    """What a DequantizeLinear gives of integers, scales and zero points if there are any, one for each block."""
    integers, *others = stored
    scale, *zero_points = (np.repeat(each, block_size, axis).take(range(integers.shape[axis]), axis) for each in others)
    steps = integers.astype(np.float32)
    for zero_point in zero_points:
        steps = steps - zero_point.astype(np.float32)
    return np.asarray(steps * scale, dtype=np.float32)


def rounded_in_blocks(x: Tensor, block: int = BLOCK) -> Tensor:
    """``x`` with each ``block`` of its last axis (a rest as well) rounded to 8 bits, float32 as it was."""
    size = x.shape[-1]
    padded = functional.pad(x, (0, -size % block))
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / _MOST
    steps = (blocks / torch.where(step > 0, step, 1)).round_()
    rounded: Tensor = (steps * step).reshape(padded.shape)[..., :size]
    return rounded
