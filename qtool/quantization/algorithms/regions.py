"""Regions: the parts of a quantized graph that are reconstructed at once, each with one output.

A *unit* is one segment between two quantizers: a convolution or linear layer with the activation fused to it; where
there are no quantizers, because weights alone are quantized, ``unit_ends`` says where it ends. A *block*
is what lies between two values that everything passes through: with the values in their order, position i is such a
point (an articulation) when nothing made before it is read after it. In a chain every unit is a block of its own; a
residual path, with the units on both of its sides up to their sum, is one block. A network whose first value is read
at its end (a U-Net) is a single block in this sense: a block of more than ``MOST`` layers is taken apart into units.

What a region should have made is the value of the same operator in the float graph: its *counterpart*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from qtool.form import quantized
from qtool.graphs.operators import aten
from qtool.graphs.shapes import batch_symbols, symbols_of
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.algorithms.walk import Segment

MOST = 12
"""The greatest number of layers that are learned together."""
_QUANTIZE = quantized.quantize_per_tensor.default
_VIEWS = (aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)


@dataclass(frozen=True)
class Region:
    """Consecutive segments, read by what follows at the last one's output alone; ``layers`` are those to learn."""

    segments: tuple[Segment, ...]
    layers: tuple[Node, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Its operators in order, up to the one whose value is compared: the last one's quantizer is left out."""
        nodes = tuple(node for segment in self.segments for node in segment.nodes)
        return nodes[:-1] if nodes[-1].target is _QUANTIZE else nodes

    @property
    def output(self) -> Node:
        """The operator whose value is compared with the float model's, before it is quantized."""
        return self.nodes[-1]

    @cached_property
    def reads(self) -> tuple[Node, ...]:
        """The values that come into it."""
        own = {segment.output for segment in self.segments}
        return tuple(dict.fromkeys(n for segment in self.segments for n in segment.reads if n not in own))

    @property
    def name(self) -> str:
        """The units of its layers: the only one, or the first and the last."""
        names = [str(layer.meta.get("unit", layer.name)) for layer in self.layers]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def units(segments: Iterable[Segment], layers: Iterable[Node]) -> list[Region]:
    """Each segment as a region."""
    wanted = set(layers)
    return [Region((s,), tuple(n for n in s.nodes if n in wanted)) for s in segments]


def unit_ends(segments: Iterable[Segment], layers: Iterable[Node]) -> list[Node]:
    """Where segments are to be cut too, as where activations stay in float: behind layers and what is fused to them.

    The last layer of a segment needs no cut, unless its values are turned about in the end, samples no longer first
    (queries, keys and values of attention): its channels are told apart in front of that alone.
    """
    wanted, found = set(layers), []
    for segment in segments:
        inside = [node for node in segment.nodes if node in wanted]
        found += [_end(layer) for layer in (inside if inside and _turns(segment) else inside[:-1])]
    return found


def _turns(segment: Segment) -> bool:
    end = Region((segment,), ()).output
    return bool(batch_axis(end, batch_symbols(end.graph)))


def batch_axis(node: Node, symbols: set[Any]) -> int | None:
    """The dimension of a value that grows with the batch, 0 for a size that does; None for what does not."""
    known = node.meta.get("val")
    sizes = known.shape if isinstance(known, Tensor) else (known,)
    grows = (isinstance(size, torch.SymInt) and not symbols.isdisjoint(symbols_of(size)) for size in sizes)
    return next((axis for axis, grown in enumerate(grows) if grown), None)


def order_of(node: Node, symbols: set[Any]) -> tuple[int, int] | None:
    """How often the dimension that grows with the batch goes through all samples, and how many places each has there.

    (1, T) where positions were flattened behind the samples, (T, 1) in front of them, −1 for what is open, (1, 1) too
    for a size and where nothing grows. It is followed back to where samples stood by themselves; None where that
    cannot be done.
    """
    axis = batch_axis(node, symbols)
    if axis is None or not isinstance(node.meta["val"], Tensor):
        return 1, 1
    whole = size = _shape(node)[axis]
    turns = sympy.Integer(1)
    while size not in symbols and node.op != "placeholder":
        source = _grown_from(node, size, symbols)
        before = None if source is None else batch_axis(source, symbols)
        if source is None or before is None:
            return None
        if node.target in _VIEWS:  # which keep how many numbers lie ahead of the second sample's
            turns = turns * sympy.prod(_shape(source)[:before]) / sympy.prod(_shape(node)[:axis])
        node, axis, size = source, before, _shape(source)[before]
    counts = turns, whole / (turns * size)
    if not all(count.is_integer for count in counts) or not any(count.is_Integer for count in counts):
        return None
    outer, inner = (int(count) if count.is_Integer else -1 for count in counts)
    return outer, inner


def _shape(node: Node) -> list[Any]:
    return [sympy.Integer(size) if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]


def _grown_from(node: Node, size: Any, symbols: set[Any]) -> Node | None:
    """What an operator has its samples from in the order they have: what it views, or the same number of rows."""
    for source in _tensors_into(node):
        axis = batch_axis(source, symbols)
        if axis is not None and (node.target in _VIEWS or _shape(source)[axis] == size):
            return source
    return None


def _tensors_into(node: Node) -> Iterator[Node]:
    """The tensors that an operator reads, also those of which it has a quantized form or a part of a result."""
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), Tensor):
            yield source
        else:
            yield from _tensors_into(source)


def _end(layer: Node) -> Node:
    follower = next(iter(layer.users)) if len(layer.users) == 1 else None
    fused = follower is not None and "unit" in layer.meta and follower.meta.get("unit") == layer.meta["unit"]
    return _end(follower) if fused and follower is not None else layer


def blocks(segments: list[Segment], layers: Iterable[Node]) -> tuple[list[Region], list[str]]:
    """The regions between articulation points, in order, and the names of those that were too large for one."""
    wanted, last = set(layers), {node: i for i, segment in enumerate(segments) for node in segment.reads}
    found: list[Region] = []
    large: list[str] = []
    alive: set[Node] = set()
    start = 0
    for index, segment in enumerate(segments):
        alive = {node for node in alive if last[node] > index}
        if not alive:
            part = segments[start : index + 1]
            region = Region(tuple(part), tuple(n for s in part for n in s.nodes if n in wanted))
            split = len(region.layers) > MOST
            large += [region.name] if split else []
            found += units(part, wanted) if split else [region]
            start = index + 1
        if last.get(segment.output, -1) > index and isinstance(segment.output.meta.get("val", None), Tensor | None):
            alive.add(segment.output)
    return found + units(segments[start:], wanted), large


def counterparts(subject: Subject, nodes: Iterable[Node]) -> dict[Node, Node]:
    """The operators of the float graph that compute what ``nodes`` of the quantized one stand for, where there are any.

    A quantizer's is that of the value it quantizes.
    """
    by_name = {node.name: node for node in subject.reference.graph.nodes}
    by_unit = {placed.unit.name: placed.output.name for placed in subject.placement.placed}
    found = {}
    for node in nodes:
        source = node.args[0] if node.target is _QUANTIZE else node
        assert isinstance(source, Node)
        for name in (by_unit.get(str(source.meta.get("unit"))), source.name):
            if name in by_name and by_name[name].target == source.target:
                found[node] = by_name[name]
                break
    return found
