"""Operators that are one in ONNX, and that torch's exporter knows only as what it decomposes them to.

For one of them it traces the whole graph anew, which takes longer than all else of an export; in transformers a mask's
conversions are enough. Checks of types, which torch writes beside conversions, say nothing that a file could.

Of an antialiased resizing by a factor it leaves out the factor, which says where numbers lie: 0.3 of 16 are 4, a number
each 3.3 and not 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import INT64
from onnxscript import opset18 as op  # the least that any target asks for
from torch.fx import Graph

from qtool.errors import QtoolError
from qtool.pixels import PIXELS

aten = torch.ops.aten

_POOLS = (aten.avg_pool2d.default, aten.avg_pool3d.default)
AVERAGED = (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)
"""Antialiased resizings, linear and cubic."""


def require_forms(graph: Graph) -> None:
    """Raises QtoolError for what torch would write as something else without a word.

    That is an average by a divisor of its own, and an antialiased resizing between corners.
    """
    for node in graph.nodes:
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


TRANSLATIONS = {
    PIXELS: bytes_of,
    aten.to.dtype: conversion,
    aten.rsub.Scalar: subtracted_from,
    aten._upsample_bilinear2d_aa.default: averaged(mode="linear"),
    aten._upsample_bicubic2d_aa.default: averaged(mode="cubic", cubic_coeff_a=-0.5),
}
