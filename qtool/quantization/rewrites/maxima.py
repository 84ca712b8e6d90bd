"""Maxima over the places of an image or a sequence as poolings, which runtimes have in integers.

What convolutions give is often read as its maximum over all places (PointNet, CBAM, networks for texts and sounds) or
over one axis of them (edge convolutions, spectrograms). A maximum over axes is one window as large as these,

    max(x, axes) = max_pool(x, windows of the axes' sizes),

and an adaptive pool whose cells are all alike, as those that divide the input's size, is a plain one. Left as they are:
maxima of open sizes, those of which something reads the places, and those of no convolution's result (of scores before
a softmax, of logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import AVERAGE_POOLS, CONVOLUTIONS, DROPOUTS, MAX_POOLS, adaptive_windows, aten
from qtool.quantization.targets.base import POINTWISE

_ADAPTIVE = (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
_PAIRS = (*_ADAPTIVE, aten.max.dim)
"""Maxima that tell their places as well."""
_THROUGH = (
    *POINTWISE, *MAX_POOLS, *AVERAGE_POOLS, *DROPOUTS, aten.batch_norm.default, aten.add.Tensor, aten.mul.Tensor,
    aten.cat.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip


def write_maxima(graph_module: GraphModule) -> int:
    """Writes the values of maxima over places as poolings, in place; returns how many."""
    written = 0
    for node in list(graph_module.graph.nodes):
        if node.target is aten.amax.default:
            written += _write(node, node)
        elif node.target in _PAIRS and not any(user.args[1] == 1 and user.users for user in node.users):
            written += sum(_write(node, user) for user in list(node.users) if user.args[1] == 0)
    if written:
        clean(graph_module)
    return written


def _write(maximum: Node, values: Node) -> bool:
    """Has a pooling give what ``values`` are, where the maximum is one; whether it is."""
    source = maximum.args[0]
    assert isinstance(source, Node)
    value = source.meta["val"]
    if not 3 <= value.dim() <= 5 or value.dtype != torch.float32 or not is_convolved(source):
        return False
    found = _cells(maximum) if maximum.target in _ADAPTIVE else _window(maximum)
    if found is None:
        return False
    pool = call_before(maximum, MAX_POOLS[len(found[0]) - 1], source, *found)
    if pool.meta["val"].dim() > values.meta["val"].dim():
        pool = call_before(maximum, aten.squeeze.dims, pool, _axes(maximum))
    values.replace_all_uses_with(pool)
    if values is not maximum:
        values.graph.erase_node(values)
    return True


def _axes(maximum: Node) -> list[int]:
    given: Any = maximum.args[1] if len(maximum.args) > 1 else []
    rank = maximum.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return sorted(int(axis) % rank for axis in (given if isinstance(given, list | tuple) else [given]))


def _window(maximum: Node) -> tuple[list[int], list[int]] | None:
    """The one window of a maximum over axes behind the channels', twice; None where it is over others or open sizes."""
    shape = maximum.args[0].meta["val"].shape  # type: ignore[union-attr]
    axes = _axes(maximum)
    if not axes or axes[0] < 2 or not all(isinstance(size, int) for size in shape[2:]):
        return None
    window = [size if axis in axes else 1 for axis, size in enumerate(shape[2:], 2)]
    return window, window


def _cells(pool: Node) -> tuple[list[int], list[int]] | None:
    """The windows of an adaptive pool and how far they are apart; None where its cells differ or sizes are open."""
    shape, counts = pool.args[0].meta["val"].shape[2:], pool.args[1]  # type: ignore[union-attr]
    known = len(shape) == 1 + _ADAPTIVE.index(pool.target)
    return adaptive_windows(shape, counts) if known else None  # type: ignore[arg-type]


def is_convolved(value: Node) -> bool:
    """Whether a convolution's result is among what a value is made of, place by place."""
    waiting, seen = [value], {value}
    while waiting:
        node = waiting.pop()
        if node.target in CONVOLUTIONS:
            return True
        if node.target in _THROUGH:
            waiting += [read for read in node.all_input_nodes if read not in seen]
            seen.update(waiting)
    return False
