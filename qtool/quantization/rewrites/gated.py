"""Gated linear units as what they are: one half of the channels times the sigmoid of the other.

    glu([a, b]) = a · sigmoid(b)

Runtimes have no kernel for the whole, and torch exports it in these parts as well. Written so in the graph, each part
can be integer: halves are moved bytes, the gate a function of 256 values, the product one multiplication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def spell_glu(node: Node) -> None:
    """Writes ``glu`` along an axis of fixed size as its parts, in place."""
    source = node.args[0]
    assert isinstance(source, Node)
    value = source.meta["val"]
    axis = int(str(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1))) % value.dim()
    size = value.shape[axis]
    if not isinstance(size, int):
        return
    half = size // 2
    with node.graph.inserting_before(node):
        kept = _add(node, aten.slice.Tensor, source, axis, 0, half)
        other = _add(node, aten.slice.Tensor, source, axis, half, size)
        gate = _add(node, aten.sigmoid.default, other)
    node.target, node.args, node.kwargs = aten.mul.Tensor, (kept, gate), {}


def _add(node: Node, target: Any, *args: Any) -> Node:
    """An operator before ``node`` whose result is of the same type and size."""
    made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    return made
