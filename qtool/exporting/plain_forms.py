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

aten = torch.ops.aten


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
    """The ONNX form of ``aten::rsub.Scalar``: ``other − alpha · source``."""
    scaled = source if alpha == 1 else op.Mul(source, _like(alpha, source))
    return op.Sub(_like(other, source), scaled)


def _like(number: float, value: Any) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=value.dtype))


TRANSLATIONS = {aten.to.dtype: conversion, aten.rsub.Scalar: subtracted_from}
