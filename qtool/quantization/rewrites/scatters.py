"""What is written into a part of a value, as a concatenation of that part and the rest.

A detector's ``y[..., 0:2] = …`` comes out of functionalization as ``slice_scatter``, behind a ``copy`` that gives what
is written the type and the shape of the part. The copy has no derivative, so that nothing could be learned through it,
and ONNX has neither: torch exports a scatter by computed indices, element by element. The same numbers are

    slice_scatter(x, v, a, b) = cat(x[:a], v, x[b:])

along the axis. Left out on purpose: steps, axes whose size is open, and parts that a mask or indices choose.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Node

from qtool.graphs.shapes import same_sizes
from qtool.quantization.rewrites.zero_parts import spell_zero_parts

aten = torch.ops.aten
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def spell_copy(node: Node) -> None:
    """A copy of values that have the type and the shape of what they overwrite is these values."""
    target, source = node.args[:2]
    if not (isinstance(target, Node) and isinstance(source, Node)):
        return
    before, after = source.meta["val"], target.meta["val"]
    if before.dtype == after.dtype and same_sizes(before.shape, after.shape):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def spell_scatter(node: Node) -> None:
    """Writes ``slice_scatter`` and ``select_scatter`` along an axis of fixed size as ``cat``, in place.

    Where all of an axis is written, of whatever size, what is written is the result.
    """
    whole, part, axis, first, end, step = _arguments(node)
    axis %= whole.meta["val"].dim()
    size = whole.meta["val"].shape[axis]
    if _is_all(first, end, size) and step == 1 and node.target is aten.slice_scatter.default:
        node.replace_all_uses_with(part)
        node.graph.erase_node(node)
        return
    bounds = _bounds(first, end, size) if isinstance(size, int) and step == 1 else None
    if bounds is None:
        return
    start, stop = bounds
    if node.target is aten.select_scatter.default:
        part = _add(node, aten.unsqueeze.default, part, axis)
    before = [_add(node, aten.slice.Tensor, whole, axis, 0, start)] if start > 0 else []
    behind = [_add(node, aten.slice.Tensor, whole, axis, stop, size)] if stop < size else []
    node.target, node.args, node.kwargs = aten.cat.default, ([*before, part, *behind], axis), {}
    spell_zero_parts(node)


def _arguments(node: Node) -> tuple[Any, ...]:
    """The value, what is written into it, the axis, where that begins and ends, and the step."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    found = [given.get(argument.name, argument.default_value) for argument in schema.arguments]
    if node.target is aten.slice_scatter.default:
        return tuple(found)
    index = found[3]
    following = (index + 1 or None) if isinstance(index, int) else index
    return (*found, following, 1)


def _is_all(first: Any, end: Any, size: Any) -> bool:
    until = sys.maxsize if end is None else end
    return first in (None, 0) and isinstance(until, int) and until >= (size if isinstance(size, int) else sys.maxsize)


def _bounds(first: Any, end: Any, size: int) -> tuple[int, int] | None:
    """Where a part of an axis begins and ends; None where that is not known, or nothing is between."""
    ends = (0 if first is None else first, size if end is None else end)
    if not all(isinstance(each, int) for each in ends):
        return None
    low, high = (min(each + size if each < 0 else each, size) for each in ends)
    return (low, high) if 0 <= low < high else None


def _add(node: Node, target: Any, source: Node, *args: Any) -> Node:
    """An operator before ``node``, made by the module that wrote it."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, (source, *args))
    made.meta = {**node.meta, "val": target(source.meta["val"], *args)}
    return made
