"""The parts of a tensor that is split, each a value of its own.

Along an axis of a known size a part is a slice (``chunk``, ``split``), or what is at one index (``unbind``). An axis of
open size that is known to be split evenly is two, and a part what is at one index of the first:

    chunk(x, n)[i] = x.reshape(n, -1, …)[i]

as where a network reads two images as one batch (siamese networks, optical flow). ONNX would make a sequence of such
parts, and torch's exporter fails on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
SPLITS = (
    aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.tensor_split.sections,
)  # fmt: skip


def spell_part(node: Node) -> None:
    """Writes one part of a split tensor as a part of it, in place, where its size is known or as the others' is."""
    split, index = node.args
    if not isinstance(split, Node) or split.target not in (*SPLITS, aten.unbind.int):
        return
    assert isinstance(index, int)
    part = _select(node, split, index) if split.target is aten.unbind.int else _part(node, split, index)
    if part is None:
        return
    part.meta = {**split.meta, **node.meta, "val": split.meta["val"][index]}
    part.meta.setdefault("nn_module_stack", split.meta.get("nn_module_stack"))
    node.replace_all_uses_with(part)
    node.graph.erase_node(node)


def _part(node: Node, split: Node, index: int) -> Node | None:
    source, axis = split.args[0], split.args[2] if len(split.args) > 2 else 0
    assert isinstance(source, Node)
    assert isinstance(axis, int)
    parts = split.meta["val"]
    sizes = [part.shape[axis] for part in parts]
    if all(isinstance(size, int) for size in sizes):
        start = sum(sizes[:index])
        return _call(node, aten.slice.Tensor, source, axis, start, start + sizes[index])
    axis %= parts[0].dim()
    shape = [size if isinstance(size, int) else -1 for size in parts[0].shape]
    if len(set(map(str, sizes))) > 1 or shape.count(-1) > 1:
        return None
    apart = _call(node, aten.reshape.default, source, [*shape[:axis], len(parts), *shape[axis:]])
    apart.meta = {**split.meta, "val": torch.stack(list(parts), axis)}
    return _call(node, aten.select.int, apart, axis, index)


def _select(node: Node, split: Node, index: int) -> Node:
    return _call(node, aten.select.int, split.args[0], split.args[1] if len(split.args) > 1 else 0, index)


def _call(before: Node, target: Any, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        return before.graph.call_function(target, args)
