"""Adaptive pools that ONNX, whose pools have windows of one size only, has no operator for.

Cell ``i`` of ``k`` is the mean or the maximum of what lies from ``⌊i·n/k⌋`` to before ``⌈(i+1)·n/k⌉`` of ``n``.

Over sizes that are open, torch writes the window that the example has: another image is pooled to other numbers, or to
another number of cells. To cells of several sizes it gathers what is in each, which takes it 10 seconds to write and
ONNX Runtime up to five times as long to compute. Averages are products with matrices that are made of these sizes. With
``P[i, j]`` one over the size of cell ``i`` where ``j`` lies in it, and else 0,

    y = P x    for each axis that is pooled.

To one cell a pool is a mean or a maximum over axes. Over sizes that are known, maxima and averages of volumes are taken
cell by cell along one axis after the other where ``k`` does not divide ``n``. Refused are maxima over open sizes to
more than one cell, averages of volumes to such, and where in uneven cells the maxima are.
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
from qtool.graphs.edits import call_before

aten = torch.ops.aten

_RANKS: dict[Any, int] = {
    aten.adaptive_avg_pool1d.default: 1, aten.adaptive_avg_pool2d.default: 2, aten.adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1, aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3,
}  # fmt: skip
"""Over how many axes a pool goes."""


def spell_pools(graph: Graph) -> None:
    """Writes an adaptive pool to one cell over axes, and one to uneven cells cell by cell, where torch has no form."""
    for node in list(graph.nodes):
        rank = _RANKS.get(node.target)
        if rank is None:
            continue
        if any(size != 1 for size in node.args[1]):
            if _is_uneven(node, rank) and node.target not in _AVERAGES and not _tells_places(node):
                _replace_values(node, _by_cell(node, rank))
            continue
        over = (node.args[0], [-axis - 1 for axis in range(rank)], True)
        if _is_maximum(node):
            if _is_open(node, rank) and not _tells_places(node):
                _replace_values(node, call_before(node, aten.amax.default, *over))
        elif rank == 2 or _is_open(node, rank):
            node.target, node.args = aten.mean.dim, over


def _by_cell(pool: Node, rank: int) -> Node:
    """The values of a pool to uneven cells: along one axis after the other, what is in each cell made one number."""
    made = pool.args[0]
    assert isinstance(made, Node)
    shape = made.meta["val"].shape
    reduce = aten.amax.default if _is_maximum(pool) else aten.mean.dim
    for axis, count in enumerate(pool.args[1], len(shape) - rank):  # type: ignore[arg-type]
        size = shape[axis]
        if count == size:
            continue
        cells = [(index * size // count, -(-(index + 1) * size // count)) for index in range(count)]
        parts = [call_before(pool, aten.slice.Tensor, made, axis, *cell) for cell in cells]
        made = call_before(pool, aten.cat.default, [call_before(pool, reduce, p, [axis], True) for p in parts], axis)
    return made


def _replace_values(pool: Node, values: Node) -> None:
    """Has what takes the values of a pool take these; where a maximum is, nothing asks."""
    for user in list(pool.users) if _is_maximum(pool) else []:
        if not user.args[1]:
            user.replace_all_uses_with(values)
        pool.graph.erase_node(user)
    pool.replace_all_uses_with(values)
    pool.graph.erase_node(pool)


def _tells_places(pool: Node) -> bool:
    """Whether something asks where in its cells the maxima are."""
    return _is_maximum(pool) and any(user.args[1] and user.users for user in pool.users)


def _is_uneven(pool: Node, rank: int) -> bool:
    """Whether a pool over known sizes has cells that do not divide them."""
    source = pool.args[0]
    assert isinstance(source, Node)
    sizes = list(zip(source.meta["val"].shape[-rank:], pool.args[1], strict=True))  # type: ignore[arg-type]
    known = all(isinstance(number, int) for size in sizes for number in size)
    return known and any(size % count for size, count in sizes)


def _is_maximum(pool: Node) -> bool:
    return "max" in str(pool.target)


def translations(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The forms in ONNX of a graph's adaptive averages, where sizes are open or cells uneven."""
    lacking = {node.target for node in graph.nodes if _lacks_form(node)}
    return {target: form for target, form in _AVERAGES.items() if target in lacking}


def require_forms(graph: Graph) -> None:
    """Raises QtoolError for an adaptive pool over open sizes, or to uneven cells, that has no form here."""
    for node in (node for node in graph.nodes if node.target in _RANKS and node.target not in _AVERAGES):
        name, rank = str(node.target).split(".")[1], _RANKS[node.target]
        if _is_open(node, rank) and any(size != 1 for size in node.args[1]):
            raise QtoolError(
                f"export, '{node.name}'", "a pooling that has an ONNX form over sizes that are open",
                name, "average images or sequences, or leave --dynamic-axes out",
            )  # fmt: skip
        if _is_uneven(node, rank):
            raise QtoolError(
                f"export, '{node.name}'", "a pooling that has an ONNX form", f"the indices of {name} to uneven cells",
                "pool to sizes that divide the input's, or use the values alone",
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


def _lacks_form(node: Node) -> bool:
    rank = _RANKS.get(node.target)
    return rank is not None and (_is_open(node, rank) or _is_uneven(node, rank))


def _is_open(node: Node, rank: int) -> bool:
    source = node.args[0]
    assert isinstance(source, Node)
    return not all(isinstance(size, int) for size in source.meta["val"].shape[-rank:])
