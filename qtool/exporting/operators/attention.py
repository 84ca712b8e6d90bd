"""Attention in ONNX: ``softmax(q kᵀ · scale + mask) v``, with what a runtime has to compute of it and no more.

torch's exporter asks each probability whether it is NaN, which those of a row are that sees nothing, and puts 0 in its
place; it turns the keys by way of shapes that it computes as the file runs, scales queries and keys by the root of
the factor each, and gives every head a copy of the keys that it shares. Here a mask hides a place with float32's lowest
number, so that nothing is NaN, and what a row gives that sees nothing is multiplied by 0, which costs one product for
each feature, and none where every row sees something (no mask, a causal or a stored one). Heads that share a key
are one more axis of the product. ONNX Runtime takes the factor and the turned keys into the product
(``FusedMatMul``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op  # the least that any target asks for

UNSEEN = float(np.finfo(np.float32).min)
"""What hides a place; half precision's own limit in a file of that (``qtool.exporting.baselines``)."""


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The ONNX form of ``aten::scaled_dot_product_attention`` in evaluation (without dropout), float32.

    ``query`` is batch × heads × L × E, ``key`` batch × key heads × S × E, ``value`` batch × key heads × S × F; the mask
    is one of batch × heads × L × S, or of what broadcasts to that: bool (True is seen), or float and added.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    sharing = query.shape[1] // key.shape[1] if enable_gqa else 1
    sizes = [0, sharing * key.shape[1], -1, value.shape[-1]]
    hidden, seen = _causal(query, key) if is_causal else _masked(attn_mask, key.shape[1], sharing)
    if sharing > 1:
        query = op.Reshape(query, _sizes(0, key.shape[1], sharing, -1, query.shape[-1]))
        turned, value = op.Unsqueeze(_turned(key), _sizes(2)), op.Unsqueeze(value, _sizes(2))
    else:
        turned = _turned(key)
    scores = op.MatMul(op.Mul(query, _constant(factor)), turned)
    shares = op.Softmax(scores if hidden is None else op.Add(scores, hidden), axis=-1)
    mixed = op.MatMul(shares, value)
    mixed = mixed if seen is None else op.Mul(mixed, seen)
    return op.Reshape(mixed, _sizes(*sizes)) if sharing > 1 else mixed


def _turned(key: Any) -> Any:
    """Keys as columns."""
    *others, rows, columns = range(len(key.shape))
    return op.Transpose(key, perm=[*others, columns, rows])


def _masked(mask: Any, heads: int, sharing: int) -> tuple[Any, Any]:
    """What is added to the scores, and 0 for rows that see nothing, 1 for others; None for what is not needed."""
    if mask is None:
        return None, None
    told, mask, lowest = mask.dtype == ir.DataType.BOOL, _apart(mask, heads, sharing), _constant(UNSEEN)
    if told:
        return op.Where(mask, _constant(0.0), lowest), _highest(op.Cast(mask, to=ir.DataType.FLOAT))
    blind = op.IsInf(_highest(mask), detect_positive=0)
    return op.Max(mask, lowest), op.Cast(op.Not(blind), to=ir.DataType.FLOAT)


def _causal(query: Any, key: Any) -> tuple[Any, None]:
    """The same of a mask that hides what comes later; its sizes are computed by the file where they are open."""
    sizes = query.shape[-2], key.shape[-2]
    if all(isinstance(size, int) for size in sizes):
        shape = _sizes(*sizes)
    else:
        shape = op.Concat(*(op.Shape(value, start=-2, end=-1) for value in (query, key)), axis=0)
    hidden = op.ConstantOfShape(shape, value=ir.tensor([UNSEEN], ir.DataType.FLOAT))  # no optimizer stores the result
    return op.Trilu(hidden, op.Constant(value_int=1), upper=1), None


def _highest(value: Any) -> Any:
    """The highest number of each row."""
    return op.ReduceMax(value, _sizes(-1), keepdims=1)


def _apart(mask: Any, heads: int, sharing: int) -> Any:
    """A mask of batch × heads × L × S with those heads apart that share a key."""
    rank = 0 if mask is None else len(mask.shape)
    if sharing == 1 or rank < 3:
        return mask
    one_for_all = mask.shape[-3] == 1
    mask = op.Unsqueeze(mask, _sizes(0)) if rank == 3 else mask
    if one_for_all:
        return op.Unsqueeze(mask, _sizes(2))
    return op.Reshape(mask, op.Concat(_sizes(0, heads, sharing), op.Shape(mask, start=-2), axis=0))


def _constant(value: float) -> Any:
    return op.Constant(value_float=value)


def _sizes(*sizes: int) -> Any:
    return op.Constant(value_ints=list(sizes))


TRANSLATIONS = {torch.ops.aten.scaled_dot_product_attention.default: attention}
