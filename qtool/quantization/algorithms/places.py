"""Where channels can be rescaled: what makes them, by a stored number for each, and the layers that read them.

What makes them is a norm: a layer norm, a root-mean-square norm, or a product with a stored number for each channel.
What reads them are linear and recurrent layers and, where channels are moved to the front, convolutions, behind
operators that only move rows or take some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from qtool.graphs.operators import CONVOLUTIONS, aten, groups_of
from qtool.graphs.shapes import same_sizes
from qtool.quantization.algorithms.streams import unfit
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.algorithms.verify import QMAX
from qtool.quantization.targets.stored import CELLS, RECURRENT

VECTORS: dict[Any, tuple[int, ...]] = {aten.layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
TURNS = (aten.permute.default, aten.transpose.int)
MOVES = (aten.reshape.default, aten.clone.default, aten.dropout.default, aten.contiguous.default)
_RECURRENT = RECURRENT.anchors[: -len(CELLS)]
PARTS = (aten.select.int, aten.slice.Tensor)


@dataclass(eq=False)
class Place:
    """A norm, the layers that read it, its channels' axis, their weights' greatest integer, and what was seen of it."""

    norm: Node
    readers: list[Node]
    axis: int = -1
    qmax: int = QMAX
    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    kept: list[Tensor] = field(default_factory=list)
    rows: int = 0


def place_of(norm: Node) -> Place | str:
    """What of a norm can be moved, or why nothing can, whatever is quantized."""
    stored = [norm.args[i] for i in vectors(norm) if i < len(norm.args)]
    if not stored or not isinstance(stored[0], Node):  # a bias alone is no place for a factor
        return "it has no weights"
    if reason := unfit(stored):
        return reason
    if norm.target in VECTORS and len(norm.args[1]) != 1:  # type: ignore[arg-type]
        return "it normalises several dimensions"
    readers: list[Node] = []
    axis = axis_of(norm)
    if (stranger := _gather(norm, axis, readers)) is not None:
        name = "the graph's output" if stranger.op == "output" else str(stranger.target).removeprefix("aten.")
        return f"{name.partition('.')[0]} reads it"
    reasons = (unfit(weights_of(reader)) for reader in readers)
    return next(filter(None, reasons), "") or Place(norm, readers, axis)


def rounded_weights(subject: Subject) -> dict[Node, int]:
    """The layers whose weights will be integers, and the greatest of these; recurrent ones read floats with them."""
    steps = {p.anchor: subject.placement.weight_format(p).steps for p in subject.placement.layers}
    recurrent = {p.anchor: QMAX for p in subject.placement.placed if p.pattern and p.pattern.kind == RECURRENT.kind}
    return steps | recurrent


def vectors(node: Node) -> tuple[int, ...]:
    """Which arguments of a node multiply or shift its channels; none for anything but a norm."""
    if node.target is not aten.mul.Tensor:
        return VECTORS.get(node.target, ())
    held = [a.meta.get("val") if isinstance(a, Node) and a.op == "get_attr" else None for a in node.args[:2]]
    stored = [isinstance(value, Tensor) and _is_by_channel(value.shape, shape_of(node)) for value in held]
    return (stored.index(True),) if sum(stored) == 1 else ()


def _is_by_channel(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether numbers of this shape multiply along one axis of a tensor of shape ``whole``: C, C × 1, ..."""
    ahead = len(whole) - len(shape)
    return bool(shape) and ahead >= 0 and same_sizes(shape[:1], whole[ahead : ahead + 1]) and set(shape[1:]) <= {1}


def axis_of(norm: Node) -> int:
    """The axis that a norm's channels lie along: the last one, but for a product with numbers of another shape."""
    if norm.target is not aten.mul.Tensor:
        return len(shape_of(norm)) - 1
    return len(shape_of(norm)) - len(shape_of(norm.args[vectors(norm)[0]]))


def _gather(node: Node, axis: int, readers: list[Node]) -> Node | None:
    """Collects the layers that read a node's channels, which lie along ``axis``, through moves; the first stranger."""
    for user in node.users:
        if user.args[0] is node and reads(user, axis):
            readers.append(user)
        elif user.target is aten.sym_size.int:  # which reads no values
            continue
        elif (moved := _moved(user, axis)) is None:
            return user
        elif (stranger := _gather(user, moved, readers)) is not None:
            return stranger
    return None


def reads(layer: Node, axis: int) -> bool:
    """Whether a layer's weights are for channels that lie along this axis of its input."""
    if layer.target not in (aten.linear.default, *_RECURRENT, *CONVOLUTIONS[:3]):
        return False
    rank = len(shape_of(layer.args[0]))
    if layer.target not in CONVOLUTIONS:
        return axis == rank - 1
    return axis == rank - len(shape_of(layer.args[1])) + 1 and groups_of(layer) == 1


def _moved(node: Node, axis: int) -> int | None:
    """Where a node that only moves a tensor's rows, or takes some of them, leaves its channels; None for any other."""
    if node.target not in (*PARTS, *TURNS, *MOVES):
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if node.target in PARTS:
        dim = cast(int, node.args[1] if len(node.args) > 1 else 0) % len(before)
        return None if dim == axis else axis - (len(after) < len(before) and dim < axis)
    if node.target in TURNS:
        turn = cast(Callable[..., Tensor], node.target)
        return turn(torch.empty(tuple(range(len(before))), device="meta"), *node.args[1:]).shape.index(axis)
    if node.target is aten.reshape.default:
        kept = axis == len(before) - 1 and same_sizes(after[-1:], before[-1:])
        return len(after) - 1 if kept else None
    return axis


def shape_of(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def weights_of(reader: Node) -> list[Node]:
    """What a layer multiplies its input with: one weight, or that of each direction of a recurrent layer's first."""
    if reader.target not in _RECURRENT:
        return [cast(Node, reader.args[1])]
    parameters, _, count = cast(tuple[list[Node], bool, int], reader.args[2:5])
    directions = 2 if reader.args[7] else 1
    return parameters[: len(parameters) // count : len(parameters) // count // directions]
