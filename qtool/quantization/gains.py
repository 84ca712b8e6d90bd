"""Gains: how much an error in each channel of a tensor shows at the outputs of the layers that read it.

A layer with weights W turns an error e of its inputs into W e. For errors that are independent between values the
expected square of that is Σ_c g_c E[e_c²], with the gain of input channel c

    g_c = Σ over the layer's outputs and taps of w²

summed over all the layers that read the tensor. Operators that leave channels as they are (activations, poolings, sums)
and moves of whole rows of channels are looked through: a tensor on a residual path has the gains of everything that
reads the path behind it, and a layer norm those of the layers that multiply its rows.

Left out on purpose: how the errors of neighbouring values go together, which would need images instead of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.graphs.shapes import same_sizes
from qtool.quantization.algorithms.bias import channel_axis
from qtool.quantization.algorithms.streams import ANCHORS, RESHAPES, keeps_channels, towards_inputs
from qtool.quantization.placement import Placement

_MOVES = (aten.permute.default, aten.transpose.int, aten.select.int, aten.slice.Tensor)


@dataclass(frozen=True)
class Gains:
    """The gain of each index of ``axis``, counted within a sample; scaled to a mean of 1."""

    axis: int
    values: Tensor


def channel_gains(graph: GraphModule, placement: Placement) -> dict[str, Gains]:
    """The gains of each value of a float graph that a layer reads, by the name that its observer has.

    The name is that of the unit which makes the value, or of the graph's input. Where units have several nodes, only
    the last one's value is of use to anyone.
    """
    found: dict[Node, tuple[int, Tensor]] = {}
    for node in reversed(list(graph.graph.nodes)):
        parts = [part for user in node.users if (part := _through(graph, node, user, found)) is not None]
        fitting = [values for axis, values in parts if (axis, len(values)) == (parts[0][0], len(parts[0][1]))]
        if fitting:
            found[node] = (parts[0][0], torch.stack(fitting).sum(0))
    names = placement.names
    return {
        placement.name_of(node): Gains(axis, values / values.mean())
        for node, (axis, values) in found.items()
        if (node in names or node.op == "placeholder") and float(values.sum()) > 0
    }


def _through(
    graph: GraphModule, node: Node, user: Node, found: dict[Node, tuple[int, Tensor]]
) -> tuple[int, Tensor] | None:
    """The gains of ``node`` towards one reader; None where they are not known."""
    if user.target in ANCHORS and user.args[0] is node:
        weight = parameter(graph, user.args[1])
        if weight is None:
            return None
        axis = channel_axis(user) % node.meta["val"].dim()
        return axis - 1, towards_inputs(weight.double(), user, torch.ones(len(weight)).double())
    if user not in found:
        return None
    axis, values = found[user]
    if keeps_channels(user, axis + 1):
        return axis, values
    before = _axis_before(user, axis + 1) if user.args[0] is node else None
    return None if before is None else (before - 1, values)


def _axis_before(move: Node, axis: int) -> int | None:
    """The axis of what ``move`` reads whose indices are those of ``axis`` of its result; None where there is none."""
    if move.target not in (*RESHAPES, *_MOVES):
        return None
    source: Any = move.args[0]
    settings: Any = move.args[1:]
    before, after = source.meta["val"].shape, move.meta["val"].shape
    if move.target is aten.permute.default:
        return int(settings[0][axis]) % len(before)
    if move.target is aten.transpose.int:
        first, second = (dim % len(before) for dim in settings)
        return int({first: second, second: first}.get(axis, axis))
    if move.target is aten.select.int:
        return int(axis + (settings[0] % len(before) <= axis))
    if move.target is aten.slice.Tensor:
        return None if settings[0] % len(before) == axis else axis
    found = axis + len(before) - len(after)  # rows of channels stay such, whatever becomes of the axes before them
    kept = found > 0 and same_sizes(before[found:], after[axis:])
    return found if kept else None
