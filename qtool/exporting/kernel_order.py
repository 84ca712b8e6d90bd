"""Weights as matrices in the order in which integer kernels read them, and which neighbours in it are too large.

Pairs are neighbours among the input channels of one tap of a convolution's group (a depthwise kernel multiplies in 32
bits), and among the rows of a matrix, of an LSTM's too. A pair of weights can saturate (``saturation.py``) only where
the positive or the negative ones add up to more than 32,767 / 255 = 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qtool.graphs.lstm import OPERATOR

Array = npt.NDArray[Any]
LIMIT = 2**15 - 1


@dataclass(frozen=True)
class AtRisk:
    """A weight (K × columns in the kernel's order) with pairs that can saturate: the first row and column of each."""

    weight: Array
    rows: Array
    columns: Array


def at_risk(weight: Array) -> AtRisk | None:
    """What of a weight does not fit into 16 bits as a pair times 255; None where all of it does."""
    padded = np.pad(weight.astype(np.int16), ((0, weight.shape[0] % 2), (0, 0)))
    first, second = padded[0::2], padded[1::2]
    risky = np.maximum(first, 0) + np.maximum(second, 0) > LIMIT // 255
    risky |= np.minimum(first, 0) + np.minimum(second, 0) < -(LIMIT // 255)
    pairs, columns = np.nonzero(risky)
    return AtRisk(padded, pairs * 2, columns) if len(pairs) else None


def matrices(kind: str, weight: Array, *, groups: int = 1, transposed: bool = False) -> list[Array]:
    """The int8 weight of a Conv, Gemm or MatMul as K × outputs, one for each group; none of a depthwise one.

    An LSTM's has one for each direction. ``transposed``: a Gemm stores outputs × K.
    """
    if kind == OPERATOR:
        return list(weight)
    if kind == "Conv":
        if groups == len(weight) > 1 and weight.shape[1] == 1:
            return []
        whole = np.moveaxis(weight, 1, -1).reshape(groups, len(weight) // groups, -1)
        return list(whole.transpose(0, 2, 1))
    if kind == "Gemm":
        return [weight.T if transposed else weight]
    return [weight] if kind == "MatMul" and weight.ndim == 2 else []
