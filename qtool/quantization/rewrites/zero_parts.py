"""Zeros at an end of a concatenation are a padding.

A temporal shift writes parts of a value into ``zeros_like`` of it, a shortcut to more channels is joined with zeros,
and so is a sequence that is moved on by a place. What makes zeros is an operator in float, and what is joined with it
would be float too, whereas a padding is integer between integers: zero is an integer of any range. The same numbers are

    cat(zeros, x, …, y, zeros) = pad(cat(x, …, y))

along the axis. Left out on purpose: zeros between other parts, and as many of them as is known with the batch only.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from qtool.graphs.operators import aten

_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FULL = (aten.full.default, aten.full_like.default, aten.new_full.default)
_MOVED = (
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.expand.default, aten.reshape.default,
    aten.permute.default, aten.transpose.int,
)  # fmt: skip


def spell_zero_parts(node: Node) -> None:
    """Writes a concatenation with zeros at an end as a padding of the rest, in place."""
    parts: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    axis = int(str((*node.args[1:], node.kwargs.get("dim", 0))[0])) % node.meta["val"].dim()
    kept = list(parts)
    while kept and _is_zero(kept[-1]):
        kept.pop()
    behind = parts[len(kept) :]
    while kept and _is_zero(kept[0]):
        kept.pop(0)
    before = parts[: len(parts) - len(behind) - len(kept)]
    sizes = [[part.meta["val"].shape[axis] for part in ends] for ends in (before, behind)]
    known = all(isinstance(size, int) for size in (*sizes[0], *sizes[1]))
    if not kept or len(kept) == len(parts) or not known or not _has_type(kept, node):
        return
    rest = kept[0] if len(kept) == 1 else _joined(kept, axis, node)
    others = node.meta["val"].dim() - 1 - axis
    amounts = [0, 0] * others + [sum(size) for size in sizes]
    node.target, node.args, node.kwargs = aten.constant_pad_nd.default, (rest, amounts, 0.0), {}


def _is_zero(value: Any) -> bool:
    """Whether a value is all zeros, of whatever size."""
    while isinstance(value, Node) and value.target in _MOVED:
        value = value.args[0]
    if not isinstance(value, Node):
        return False
    number = (value.args[-1] if value.target in _FULL else 0) if value.target in (*_ZEROS, *_FULL) else None
    return isinstance(number, int | float) and number == 0


def _has_type(parts: list[Node], whole: Node) -> bool:
    """Whether these parts alone make the type of the whole, and it is one of fractions."""
    dtype = whole.meta["val"].dtype
    return bool(dtype.is_floating_point) and all(part.meta["val"].dtype == dtype for part in parts)


def _joined(parts: list[Node], axis: int, node: Node) -> Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.cat.default, (parts, axis))
    made.meta = {**node.meta, "val": aten.cat.default([part.meta["val"] for part in parts], axis)}
    return made
