"""Bounds that a model stores as tensors of one number are numbers, and clipping by them an activation as any other.

    clamp(x, low, high) = min(max(x, low), high)

Layers that clip what they read and give hold bounds in buffers, infinite ones where none is set; learned ones (PACT,
arXiv:1805.06085) are a ``minimum`` with a parameter. In a graph that is not trained any more they are what ``relu6``
has: part of the layer before, whose range of integers clips. Infinite ones clip nothing. Left as they are: bounds for
each channel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, parameter
from qtool.graphs.operators import aten
from qtool.quantization.rewrites.respell import respell

_CLIPS: dict[Any, tuple[int | None, int | None]] = {
    aten.clamp.Tensor: (1, 2), aten.clamp_min.Tensor: (1, None), aten.clamp_max.Tensor: (None, 1),
    aten.maximum.default: (1, None), aten.minimum.default: (None, 1),
}  # fmt: skip
"""Where an operator has its lower and its upper bound, behind what it clips."""
_FREE = (-math.inf, math.inf)


def write_bounds(graph_module: GraphModule) -> int:
    """Rewrites in place each clipping by stored numbers; returns how many."""
    found = [node for node in graph_module.graph.nodes if node.target in _CLIPS]
    written = [node for node in found if _rewrite(graph_module, node)]
    if written:
        clean(graph_module)
    return len(written)


def _rewrite(graph_module: GraphModule, node: Node) -> bool:
    given = list(node.args)
    if node.target in (aten.maximum.default, aten.minimum.default) and parameter(graph_module, given[0]) is not None:
        given.reverse()
    source = given[0]
    assert isinstance(source, Node)
    places = [given[place] if place is not None and place < len(given) else None for place in _CLIPS[node.target]]
    bounds = [None if place is None else _number(graph_module, place, source) for place in places]
    if any(bound is None and place is not None for bound, place in zip(bounds, places, strict=True)):
        return False
    low, high = (None if bound == free else bound for bound, free in zip(bounds, _FREE, strict=True))
    if low == math.inf or high == -math.inf:
        return False
    if low is None and high is None:
        node.replace_all_uses_with(source)
        return True
    if source.target is aten.relu.default and len(source.users) == 1 and (high is None or high >= 0):
        source, low = source.args[0], max(low or 0.0, 0.0)
    node.target, node.args, node.kwargs = aten.clamp.default, (source, low, high), {}
    respell(node)
    return True


def _number(graph_module: GraphModule, node: object, source: Node) -> float | None:
    """The one number of a stored bound that ``source`` keeps its shape and type beside; None for any other."""
    value, clipped = parameter(graph_module, node), source.meta.get("val")
    if value is None or value.numel() != 1 or not isinstance(clipped, torch.Tensor) or clipped.dtype != value.dtype:
        return None
    return float(value) if value.dim() <= clipped.dim() and not value.isnan().any() else None
