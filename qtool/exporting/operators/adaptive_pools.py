"""Adaptive averages over sizes that are open, as products with matrices that are made of these sizes.

Cell ``i`` of ``k`` is the mean of what lies from ``⌊i·n/k⌋`` to before ``⌈(i+1)·n/k⌉`` of ``n``. ONNX has pools of
windows of one size only, and torch writes the window that the example has: another image is pooled to other numbers,
or to another number of cells. With ``P[i, j]`` one over the size of cell ``i`` where ``j`` lies in it, and else 0,

    y = P x    for each axis that is pooled.

To one cell a pool is a mean or a maximum over axes. Refused are maxima over open sizes to more than one cell, and
averages of volumes to such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import INT64
from onnxscript import opset18 as op
from torch.fx import Graph, Node

from qtool.errors import QtoolError

aten = torch.ops.aten

_RANKS: dict[Any, int] = {
    aten.adaptive_avg_pool1d.default: 1, aten.adaptive_avg_pool2d.default: 2, aten.adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1, aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3,
}  # fmt: skip
"""Over how many axes a pool goes."""


def spell_pools(graph: Graph) -> None:
    """Writes an adaptive pool to one cell over axes: torch knows one window for it, or has no form in ONNX."""
    for node in list(graph.nodes):
        rank = _RANKS.get(node.target)
        if rank is None or any(size != 1 for size in node.args[1]):
            continue
        over = (node.args[0], [-axis - 1 for axis in range(rank)], True)
        if "max" in str(node.target):
            _spell_maximum(node, over, rank)
        elif rank == 2 or _is_open(node, rank):
            node.target, node.args = aten.mean.dim, over


def _spell_maximum(pool: Node, over: tuple[Any, ...], rank: int) -> None:
    """Has what takes the values of a pool over open sizes be their maximum, unless the places are asked for too."""
    taken: dict[Node, Any] = {user: user.args[1] for user in pool.users}
    if not _is_open(pool, rank) or any(place and user.users for user, place in taken.items()):
        return
    for user, place in taken.items():
        if place:
            pool.graph.erase_node(user)
        else:
            user.target, user.args = aten.amax.default, over
    pool.graph.erase_node(pool)


def translations(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The forms in ONNX of a graph's adaptive averages, where sizes are open."""
    open_ones = {node.target for node in graph.nodes if _is_open_pool(node)}
    return {target: form for target, form in _AVERAGES.items() if target in open_ones}


def require_forms(graph: Graph) -> None:
    """Raises QtoolError for an adaptive pool over open sizes that has no form here."""
    for node in filter(_is_open_pool, graph.nodes):
        if node.target not in _AVERAGES and any(size != 1 for size in node.args[1]):
            raise QtoolError(
                f"export, '{node.name}'", "a pooling that has an ONNX form over sizes that are open",
                str(node.target).split(".")[1], "average images or sequences, or leave --dynamic-axes out",
            )  # fmt: skip


def averaged(source: Any, output_size: INT64) -> Any:
    """The ONNX form of ``aten::adaptive_avg_pool1d``."""
    return op.MatMul(source, op.Transpose(_cells(source, -1, output_size), perm=[1, 0]))


def averaged_twice(source: Any, output_size: INT64) -> Any:
    """The ONNX form of ``aten::adaptive_avg_pool2d``."""
    return op.MatMul(_cells(source, -2, output_size), averaged(source, output_size))


def _cells(source: Any, axis: int, counts: Any) -> Any:
    """Which numbers along an axis are in which cell, divided by how many these are: cells × size."""
    nothing, one, place = _whole(0), _whole(1), _whole(axis)
    size, count = (op.Gather(sizes, place) for sizes in (op.Shape(source), op.Cast(counts, to=ir.DataType.INT64)))
    column = op.Unsqueeze(op.Range(nothing, count, one), op.Constant(value_ints=[1]))
    starts = op.Div(op.Mul(column, size), count)
    ends = op.Div(op.Add(op.Mul(op.Add(column, one), size), op.Sub(count, one)), count)
    numbers = op.Range(nothing, size, one)
    inside = op.And(op.GreaterOrEqual(numbers, starts), op.Less(numbers, ends))
    return op.Div(op.Cast(inside, to=ir.DataType.FLOAT), op.Cast(op.Sub(ends, starts), to=ir.DataType.FLOAT))


_AVERAGES: dict[Any, Callable[..., Any]] = {
    aten.adaptive_avg_pool1d.default: averaged, aten.adaptive_avg_pool2d.default: averaged_twice,
}  # fmt: skip


def _whole(number: int) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=ir.DataType.INT64))


def _is_open_pool(node: Node) -> bool:
    rank = _RANKS.get(node.target)
    return rank is not None and _is_open(node, rank)


def _is_open(node: Node, rank: int) -> bool:
    source = node.args[0]
    assert isinstance(source, Node)
    return not all(isinstance(size, int) for size in source.meta["val"].shape[-rank:])
