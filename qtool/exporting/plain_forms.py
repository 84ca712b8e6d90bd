"""Operators that are one in ONNX, and that torch's exporter knows only as what it decomposes them to.

For one of them it traces the whole graph anew, which takes longer than all else of an export; in transformers a mask's
conversions are enough. Checks of types, which torch writes beside conversions, say nothing that a file could.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op  # the least that any target asks for
from torch.fx import Graph

from qtool.errors import QtoolError

aten = torch.ops.aten

_POOLS = (aten.avg_pool2d.default, aten.avg_pool3d.default)


def require_forms(graph: Graph) -> None:
    """Raises QtoolError for an average by a divisor of its own: torch would write it as a mean without a word."""
    for node in graph.nodes:
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


TRANSLATIONS = {aten.to.dtype: conversion, aten.rsub.Scalar: subtracted_from}
