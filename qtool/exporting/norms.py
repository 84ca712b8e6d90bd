"""Group norms in ONNX: a norm of each group as one channel, then a factor and a shift for each of the channels.

ONNX Runtime's CPU provider has no kernel for ``GroupNormalization``: it writes the operator out as eighteen, shapes and
casts among them. It has kernels for ``InstanceNormalization`` and
``BatchNormalization``, of which two give

    y = (x − mean) / sqrt(variance + ε) · w + b

over groups in less than half the time. The second has mean 0 and variance 1, and is left out where there is neither
``w`` nor ``b``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op  # the least that any target asks for


def group_norm(
    source: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:  # fmt: skip
    """The ONNX form of ``aten::group_norm`` in float32, of batch × channels × any sizes."""
    grouped = op.Reshape(source, op.Constant(value_ints=[0, num_groups, -1]))
    normed = op.InstanceNormalization(grouped, *_constants(num_groups, 1, 0), epsilon=eps)
    whole = op.Reshape(normed, _sizes(source))
    if weight is None and bias is None:
        return whole
    zeros, ones = _constants(source.shape[1], 0, 1)
    affine = ones if weight is None else weight, zeros if bias is None else bias
    return op.BatchNormalization(whole, *affine, zeros, ones, epsilon=0.0)


def _constants(length: int, *numbers: float) -> list[Any]:
    """A vector of each number."""
    return [op.Constant(value=ir.tensor(np.full(length, number, np.float32))) for number in numbers]


def _sizes(source: Any) -> Any:
    """The sizes of a value, of which the first need not be known and one more may not be."""
    sizes = [0, *(size if isinstance(size, int) else -1 for size in list(source.shape)[1:])]
    return op.Constant(value_ints=sizes) if sizes.count(-1) < 2 else op.Shape(source)


TRANSLATIONS = {torch.ops.aten.group_norm.default: group_norm}
