"""Channels that become pixels, for runtimes whose integer convolutions have the channels last.

With channels first, a pixel shuffle gathers the numbers of a row of pixels from as many channels as it has phases, byte
by byte. With channels last, and the phases before the channels that they have, whole rows of channels move:

    N × H × W × (s·s·C)  →  N × (H·s) × (W·s) × C    by exchanging W with the first s

The convolution in front of the shuffle gives its channels in that order if the rows of its weight stand so, and
turning its result to channels last is undone by the runtime, which turned it itself. ONNX Runtime's shuffle takes a
tenth of a small U-Net's time, and nearly nothing so; OpenVINO's is quicker as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, owner, parameter, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten, groups_of
from qtool.quantization.placement import first_match
from qtool.quantization.rewrites.norms import NORMAL, readers_of
from qtool.quantization.targets.base import POINTWISE

_PLAIN = CONVOLUTIONS[:3]


def write_rows(graph_module: GraphModule, overrides: Mapping[str, str]) -> int:
    """Rewrites in place each pixel shuffle of what one convolution gives in integers; returns how many."""
    shuffles = [node for node in graph_module.graph.nodes if node.target is aten.pixel_shuffle.default]
    readers = readers_of(graph_module)
    pairs = [(conv, node) for node in shuffles if (conv := _convolution(node, readers)) is not None]
    pairs = [(conv, node) for conv, node in pairs if not stays_float(conv, overrides)]
    for conv, shuffle in pairs:
        stride = int(str(shuffle.args[1]))
        _sort(graph_module, conv, stride**2)
        _rewrite(shuffle, stride)
    if pairs:
        clean(graph_module)
    return len(pairs)


def stays_float(layer: Node, overrides: Mapping[str, str]) -> bool:
    """Whether it is to stay in float by its name."""
    pattern = first_match(overrides, [owner(layer)])
    return pattern is not None and overrides[pattern] == "float"


def _convolution(shuffle: Node, readers: Mapping[str, int]) -> Node | None:
    """What gives the shuffled channels, if nothing else reads them or its weights."""
    node = shuffle.args[0]
    if isinstance(node, Node) and node.target in POINTWISE and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, Node) or node.target not in _PLAIN or len(node.users) != 1:
        return None
    stored = [value for value in node.args[1:3] if isinstance(value, Node)]
    alone = all(value.op == "get_attr" and readers[str(value.target)] == 1 for value in stored)
    return node if groups_of(node) == 1 and alone else None


def _sort(graph_module: GraphModule, conv: Node, num_phases: int) -> None:
    """Puts the rows of a convolution's weight and bias in the order of phases, then channels."""

    def turned(rows: Tensor) -> Tensor:
        return rows.reshape(-1, num_phases, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape).contiguous()

    for value in conv.args[1:3]:
        if isinstance(value, Node) and (old := parameter(graph_module, value)) is not None:
            path = str(value.target)
            set_parameter(graph_module, path, turned(old), like=path)
    if NORMAL in conv.meta:
        conv.meta[NORMAL] = tuple(turned(value) for value in conv.meta[NORMAL])


def _rewrite(shuffle: Node, stride: int) -> None:
    """Lays rows of channels out instead, and cuts what was cut off behind the shuffle before they are turned back."""
    cuts, last = [], shuffle
    while len(last.users) == 1 and _is_cut(user := next(iter(last.users))):
        cuts.append(user)
        last = user
    with last.graph.inserting_before(last.next):
        made = rows(shuffle, shuffle.args[0], [stride, stride])  # type: ignore[arg-type]
        for cut in cuts:
            _, axis, *ends = cut.args
            batch, channels, *pixels = cut.meta["val"].shape
            made = call(cut, aten.slice.Tensor, (made, axis - 1, *ends), [batch, *pixels, channels])  # type: ignore[operator]
        made = channels_first(last, made)
    last.replace_all_uses_with(made)


def _is_cut(node: Node) -> bool:
    """Whether it takes a part of the rows or the columns."""
    return node.target is aten.slice.Tensor and len(node.args) > 1 and node.args[1] in (2, 3) and not node.kwargs


def rows(near: Node, phases: Node, strides: list[int]) -> Node:
    """N × (phases · channels) × places as N × pixels × channels, pixels being places times ``strides``."""
    rank = len(strides)
    batch, channels, *places = phases.meta["val"].shape
    spatial = range(1, 1 + rank)
    shape = [batch, *places, *strides, channels // math.prod(strides)]
    last = call(near, aten.permute.default, (phases, [0, *(1 + a for a in spatial), 1]), [batch, *places, channels])
    last = call(near, aten.unflatten.int, (last, 1 + rank, shape[1 + rank :]), shape)
    if rank > 1:
        order = [0, *(axis for a in spatial for axis in (a, a + rank)), 1 + 2 * rank]
        shape = [shape[axis] for axis in order]
        last = call(near, aten.permute.default, (last, order), shape)
    for a in spatial:
        shape = [*shape[:a], shape[a] * shape[a + 1], *shape[a + 2 :]]
        last = call(near, aten.flatten.using_ints, (last, a, a + 1), shape)
    return last


def channels_first(near: Node, value: Node) -> Node:
    """N × pixels × channels as N × channels × pixels."""
    batch, *pixels, channels = value.meta["val"].shape
    order = [0, 1 + len(pixels), *range(1, 1 + len(pixels))]
    return call(near, aten.permute.default, (value, order), [batch, channels, *pixels])


def call(near: Node, target: Any, arguments: tuple[Any, ...], shape: list[Any]) -> Node:
    """An operator of the module that ``near`` belongs to, which gives a tensor of that shape."""
    made = near.graph.call_function(target, arguments)
    made.meta = {key: value for key, value in near.meta.items() if key != NORMAL}
    made.meta["val"] = near.meta["val"].new_empty(shape)
    return made
