"""Attention with one axis of heads, which its ONNX form asks for.

Models also write it without one (three dimensions), and with several (windows of an image beside the heads). Its
factors get another shape and its result the one that was written; what is computed stays the same.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

aten = torch.ops.aten


def spell_attention(node: Node) -> None:
    """Gives one attention its axis of heads, in place."""
    if node.meta["val"].dim() > 4:
        _join_heads(node)
    if node.meta["val"].dim() != 3:
        return
    values = [arg if isinstance(arg, Node) else None for arg in node.args[:4]]
    spread = list(node.args)
    for index, value in enumerate(values):
        if value is not None and value.meta["val"].dim() == 3:  # a mask of tokens × tokens is for all heads
            with node.graph.inserting_before(node):
                spread[index] = one_head = node.graph.call_function(aten.unsqueeze.default, (value, 1))
            one_head.meta = {**node.meta, "val": value.meta["val"].unsqueeze(1)}
    with node.graph.inserting_after(node):
        mixed = node.graph.call_function(aten.squeeze.dim, (node, 1))
    mixed.meta = dict(node.meta)
    node.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    node.args, node.meta = tuple(spread), {**node.meta, "val": node.meta["val"].unsqueeze(1)}


def _join_heads(node: Node) -> None:
    """Writes attention over batch × heads × windows … × tokens × features with all of these but batch as heads.

    A factor with one of what another has many of, as keys of several queries are, is spread to that many first.
    """
    mask = [value for value in node.args[3:4] if isinstance(value, Node)]
    sources = [value for value in node.args[:3] if isinstance(value, Node)]
    shapes = [list(value.meta["val"].shape) for value in (*sources, node)]
    plain = not node.kwargs.get("attn_mask") and not node.kwargs.get("enable_gqa") and not mask
    if not plain or not all(isinstance(size, int) for shape in shapes for size in shape[1:]):
        return
    graph, value = node.graph, node.meta["val"]
    if any(len(shape) != value.dim() for shape in shapes):
        return
    heads = shapes[-1][1:-2]
    for index, source in enumerate(sources):
        seen = source.meta["val"]
        with graph.inserting_before(node):
            if shapes[index][1:-2] != heads:
                seen = seen.expand(-1, *heads, -1, -1)
                source = graph.call_function(aten.expand.default, (source, [-1, *heads, -1, -1]))
                source.meta = {**node.meta, "val": seen}
            flat = graph.call_function(aten.reshape.default, (source, [-1, math.prod(heads), *shapes[index][-2:]]))
        flat.meta = {**node.meta, "val": seen.flatten(1, -3)}
        node.update_arg(index, flat)
    with graph.inserting_after(node):
        restored = graph.call_function(aten.reshape.default, (node, [-1, *shapes[-1][1:]]))
    restored.meta = dict(node.meta)
    node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    node.meta = {**node.meta, "val": value.flatten(1, -3)}
