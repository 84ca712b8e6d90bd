"""Values of bfloat16 within a model of float32, as float32 that is rounded where they were.

A model may keep a part of its arithmetic in 16 bits (a Falcon the slopes of its alibi, arXiv 2108.12409), for which
ONNX Runtime has no kernels on a CPU. torch computes such an operator in float32 and rounds what it gives,

    op(x, y) in bfloat16 = bfloat16(op(float32(bfloat16(x)), float32(bfloat16(y)))),

and conversions there and back are operators that runtimes have. What torch's own kernels for 16 bits add up in another
order differs by a rounding.

Left as it is on purpose: float16, which runtimes compute in. What a model gives is none of these values: the capture
refuses it in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

aten = torch.ops.aten

_MOVES = (
    aten.reshape.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.cat.default,
    aten.flatten.using_ints, aten.contiguous.default, aten.clone.default, aten.repeat.default,
)  # fmt: skip
_OF_NUMBERS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
"""Operators that take whole numbers as numbers, and so in 16 bits, rather than as positions."""


def write_floats(graph_module: GraphModule) -> int:
    """Rewrites in place; returns how many values of bfloat16 there were."""
    graph = graph_module.graph
    exact: set[Node] = set()
    found = [node for node in graph.nodes if _kind(node) is torch.bfloat16]
    for node in found:
        readers = list(node.users)
        if node.target is aten.to.dtype or not isinstance(node.target, torch._ops.OpOverload):  # a stored one too
            made = _converted(node, torch.float32, readers)
        else:
            _widen(node, exact)
            made = node if node.target in _MOVES else _rounded(node, readers)
        exact.add(made)
    for node in list(graph.nodes) if found else ():
        if node.target is aten.to.dtype and _kind(node) is _kind(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if found:
        graph.eliminate_dead_code()
        graph_module.recompile()
    return len(found)


def _widen(node: Node, exact: Collection[Node]) -> None:
    """Has an operator read and give float32, what it reads rounded as it would be; ``exact`` values are so already."""
    kinds = (torch.float32, torch.int32, torch.int64) if node.target in _OF_NUMBERS else (torch.float32,)
    for source in node.all_input_nodes:
        if _kind(source) in kinds and source not in exact:
            _rounded(source, [node])
    wide = map_aggregate((node.args, node.kwargs), lambda value: torch.float32 if value is torch.bfloat16 else value)
    node.args, node.kwargs = wide
    node.meta["val"] = node.meta["val"].float()


def _rounded(source: Node, readers: Collection[Node]) -> Node:
    made = _converted(_converted(source, torch.bfloat16, ()), torch.float32, ())
    for reader in readers:
        reader.replace_input_with(source, made)
    return made


def _converted(source: Node, kind: torch.dtype, readers: Collection[Node]) -> Node:
    """A conversion behind a value, which ``readers`` of it read instead."""
    with source.graph.inserting_after(source):
        made = source.graph.call_function(aten.to.dtype, (source, kind))
    made.meta = {**source.meta, "val": source.meta["val"].to(kind)}
    for reader in readers:
        reader.replace_input_with(source, made)
    return made


def _kind(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, Tensor) else None
