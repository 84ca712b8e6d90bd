"""Operators that are one in ONNX, and that torch's exporter knows only as what it decomposes them to.

For one of them it traces the whole graph anew, which takes longer than all else of an export; in transformers a mask's
conversions are enough. Checks of types, which torch writes beside conversions, say nothing that a file could.

Products along an axis and distances between rows are none there, and what torch decomposes them to has no form either.
Products are multiplied by those of as many numbers as they hold themselves, in as many steps as the axis is long in
bits. Distances are lengths of differences; Euclidean ones between many rows come of products of matrices, as torch has
them, since all differences are as many numbers as rows times rows times columns.

Of an antialiased resizing by a factor it leaves out the factor, which says where numbers lie: 0.3 of 16 are 4, a number
each 3.3 and not 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import INT64
from onnxscript import opset18 as op  # the least that any target asks for
from torch.fx import Graph

from qtool.errors import QtoolError
from qtool.graphs.pixels import PIXELS

aten = torch.ops.aten

_POOLS = (aten.avg_pool2d.default, aten.avg_pool3d.default)
AVERAGED = (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)
"""Antialiased resizings, linear and cubic."""


def require_forms(graph: Graph) -> None:
    """Raises QtoolError for what torch would write as something else without a word, or refuse by a name of its own.

    The first are an average by a divisor of its own, and an antialiased resizing between corners; the others products
    along an axis of open size, and other distances than there are forms for.
    """
    for node in graph.nodes:
        if node.target is aten.cumprod.default and not isinstance(_size(node.args[0], node.args[1]), int):
            raise QtoolError(
                f"export, '{node.name}'", "products along an axis of known size", "cumprod along one that is open",
                "leave --dynamic-axes out",
            )  # fmt: skip
        if node.target is aten.cdist.default and (given := node.args[2] if len(node.args) > 2 else 2.0) not in _LENGTHS:
            raise QtoolError(
                f"export, '{node.name}'", f"distances with p of {', '.join(f'{p:g}' for p in _LENGTHS)}",
                f"cdist with p={given}", "write it with abs, pow and sum",
            )  # fmt: skip
        if node.target in AVERAGED and node.args[2]:
            raise QtoolError(
                f"export, '{node.name}'", "a resizing that has an ONNX form", "antialias with align_corners",
                "leave one of them out",
            )  # fmt: skip
        if node.target in _POOLS and len(node.args) > 6 and node.args[6] is not None:
            raise QtoolError(
                f"export, '{node.name}'", "a pooling that has an ONNX form",
                "divisor_override with ceil_mode over sizes that are open", "leave one of them out",
            )  # fmt: skip


def _size(source: Any, axis: Any) -> int | torch.SymInt:
    """The size of a value along an axis; 1 of a single number."""
    shape = source.meta["val"].shape
    return shape[axis] if shape else 1


def drop_checks(graph: Graph) -> None:
    """Removes the checks of types from a program's graph."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def conversion(
    source: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None
) -> Any:
    """The ONNX form of ``aten::to.dtype``."""
    return op.Cast(source, to=dtype)


def subtracted_from(source: Any, other: float, alpha: float = 1) -> Any:
    """The ONNX form of ``aten::rsub.Scalar``, ``other − alpha · source``: of whole numbers and a float, floats."""
    kind = source.dtype
    if kind.is_integer() and any(isinstance(number, float) for number in (other, alpha)):
        kind = ir.DataType.FLOAT
        source = op.Cast(source, to=kind)
    scaled = source if alpha == 1 else op.Mul(source, _number(alpha, kind))
    return op.Sub(_number(other, kind), scaled)


def _number(number: float, kind: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=kind))


def multiplied(source: Any, dim: int, dtype: int = -1) -> Any:
    """The ONNX form of ``aten::cumprod``: of whole numbers int64."""
    kind = ir.DataType(dtype) if dtype >= 0 else source.dtype if source.dtype.is_floating_point() else ir.DataType.INT64
    shape = source.shape
    result = op.Cast(source, to=kind)
    reach = 1
    while shape and reach < shape[dim]:
        amounts = [0] * (2 * len(shape))
        amounts[dim % len(shape)], amounts[dim % len(shape) + len(shape)] = reach, -reach
        result = op.Mul(result, op.Pad(result, op.Constant(value_ints=amounts), _number(1, kind)))
        reach *= 2
    return result


def distances(one: Any, other: Any, p: float = 2.0, compute_mode: int = 0) -> Any:
    """The ONNX form of ``aten::cdist``."""
    rows = (one.shape[-2], other.shape[-2])
    few = all(isinstance(count, int) and count <= _FEW_ROWS for count in rows)
    last = op.Constant(value_ints=[-1])
    if p != 2 or compute_mode == 2 or (few and compute_mode != 1):
        tall, wide = (op.Unsqueeze(x, op.Constant(value_ints=[axis])) for x, axis in ((one, -2), (other, -3)))
        return _LENGTHS[p](op.Sub(tall, wide), last)
    turned = _turned(other)
    mixed = op.MatMul(one, turned)
    norms = op.Add(op.ReduceSumSquare(one, last), op.ReduceSumSquare(turned, op.Constant(value_ints=[-2])))
    squares = op.Sub(norms, op.Add(mixed, mixed))
    return op.Sqrt(op.Relu(squares))


def _turned(source: Any) -> Any:
    """A matrix with its rows as columns, or a batch of such."""
    rank = len(source.shape)
    return op.Transpose(source, perm=[*range(rank - 2), rank - 1, rank - 2])


def averaged(**kind: Any) -> Callable[..., Any]:
    """The ONNX form of an antialiased resizing of images, ``kind`` being the attributes of its filter."""

    def resized(
        source: Any, output_size: INT64, align_corners: bool, scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:  # fmt: skip
        scales = sizes = None
        if scales_h is not None and scales_w is not None:
            scales = op.Constant(value_floats=[1.0, 1.0, scales_h, scales_w])
        else:
            sizes = op.Concat(op.Shape(source, start=0, end=2), op.Cast(output_size, to=ir.DataType.INT64), axis=0)
        return op.Resize(source, None, scales, sizes, antialias=1, exclude_outside=1, **kind)

    return resized


def bytes_of(source: Any, scale: Any, zero_point: Any, shift: Any, inside: float | None) -> Any:
    """The ONNX form of ``qtool::pixels``."""
    rank = len(source.shape)
    if source.dtype != ir.DataType.FLOAT:
        source = op.Cast(source, to=ir.DataType.FLOAT)
    whole = op.Add(op.Round(op.Div(op.Add(source, shift), scale)), zero_point)
    if inside is None:
        return whole
    ends = [0] * (2 * rank)
    ends[rank + 1] = 1
    return op.Pad(whole, op.Constant(value_ints=ends), op.Constant(value_float=inside))


_FEW_ROWS = 25
"""Between no more torch takes differences."""
_LENGTHS: dict[float, Callable[[Any, Any], Any]] = {
    1.0: lambda apart, axis: op.ReduceL1(apart, axis, keepdims=0),
    2.0: lambda apart, axis: op.ReduceL2(apart, axis, keepdims=0),
    math.inf: lambda apart, axis: op.ReduceMax(op.Abs(apart), axis, keepdims=0),
}
TRANSLATIONS = {
    PIXELS: bytes_of,
    aten.to.dtype: conversion,
    aten.rsub.Scalar: subtracted_from,
    aten.cumprod.default: multiplied,
    aten.cdist.default: distances,
    aten._upsample_bilinear2d_aa.default: averaged(mode="linear"),
    aten._upsample_bicubic2d_aa.default: averaged(mode="cubic", cubic_coeff_a=-0.5),
}
