"""Masks of attention in half precision: constants beyond its range for which its own limit does as well.

A mask adds −1e9, or chooses it, where a softmax is to give 0. Half precision ends at 65,504, but exp(−65,504) is 0 too:

    softmax(s + m)ᵢ = exp(sᵢ + mᵢ) / Σⱼ exp(sⱼ + mⱼ),    mᵢ = −1e9 → −65,504

So such a constant is cut to half's limit, as ONNX Runtime's converter does with any, where nothing but a softmax, an
exponential or a sigmoid reads what is made of it, on ways that add, choose, take the greater and move. Where a tensor
is multiplied with it, that has to hold zeros and ones: scores · 1e6 are no mask, but scores made steep. Both are no
proof (all places of a row may be hidden, scores may differ by 65,504), so the outputs for samples have to stay what
they were.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.exporting.gates.simulation import interpret
from qtool.graphs.captured import call_captured
from qtool.graphs.operators import aten, packet_of
from qtool.masks import within
from qtool.nested import tensors

LARGEST = float(np.finfo(np.float16).max)
LIMIT = float(np.finfo(np.float32).max)
SAME = 1e-5
"""How far from its largest value, as a share of that, an output may be that counts as unchanged."""

_SUMS = (aten.add, aten.sub, aten.rsub)
_CHOICES = (aten.where, aten.masked_fill, aten.maximum, aten.minimum, aten.amax)
_FILLED = (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor, aten.constant_pad_nd)
_PRODUCTS = (aten.mul, aten.div)
_MOVES = (
    aten.reshape, aten.view, aten.flatten, aten.unflatten, aten.permute, aten.transpose, aten.squeeze, aten.unsqueeze,
    aten.expand, aten.expand_as, aten.slice, aten.select, aten.index, aten.index_select, aten.cat, aten.stack,
    aten.repeat, aten.tile, aten.contiguous, aten.clone, aten.to, aten._to_copy, aten.type_as, aten.dropout,
    aten.triu, aten.tril, aten.neg,
)  # fmt: skip
_ENDS = (aten.softmax, aten._softmax, aten.exp, aten.sigmoid)
_SILENT = (aten.sym_size,)


@dataclasses.dataclass(frozen=True)
class HalfMasks:
    """A float graph as half precision can hold it, and what was done to its masks for that."""

    graph: GraphModule
    constants: tuple[float, ...] = ()
    """What is cut to ±65,504 in ``graph``."""
    hidden: frozenset[str] = frozenset()
    """The names of the nodes that hold masks: what lies below −65,504 there becomes −∞ in half and hides as well."""
    refused: str = ""
    """Why the masks' constants are left as they are."""


@dataclasses.dataclass
class _Way:
    """What a constant reaches before a softmax, and the tensors that are multiplied with it."""

    reached: set[Node] = dataclasses.field(default_factory=set)
    factors: set[Node] = dataclasses.field(default_factory=set)


def cut(graph: GraphModule, samples: Sequence[Any]) -> HalfMasks:
    """``graph`` with the constants of its masks cut to half's range; the graph itself where it has none beyond that.

    The copy shares all other tensors. Where ``samples``, batches of inputs, give other outputs then, the masks stay.
    """
    ways = {node: way for node in graph.graph.nodes if beyond_in(graph, node) and (way := _way(node)) is not None}
    if not ways:
        return HalfMasks(graph)
    factors = {factor for way in ways.values() for factor in way.factors}
    run = _Truths(graph, factors)
    wanted = [list(tensors(interpret(run, batch))) for batch in samples]
    if run.others:
        return HalfMasks(graph, refused=f"what masks are multiplied with is not 0 or 1 in {min(run.others)}")
    made = _cut(graph, set(ways))
    if not all(_same(call_captured(made, batch), want) for batch, want in zip(samples, wanted, strict=True)):
        return HalfMasks(graph, refused="with masks of half's limit the outputs for the samples are others")
    constants = sorted({value for node in ways for value in beyond_in(graph, node)})
    reached = {node.name for way in ways.values() for node in way.reached}
    return HalfMasks(made, tuple(constants), frozenset(reached))


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def beyond_in(graph: GraphModule, node: Node) -> list[float]:
    """The constants beyond half's range that a node brings in, float32's limits and infinities aside."""
    if node.op == "get_attr":
        tensor = operator.attrgetter(str(node.target))(graph)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            return []
        ends: list[Any] = [tensor.abs().masked_fill(tensor.abs() >= LIMIT, 0).max().item()]
    elif _is_float(node) and packet_of(node) in (*_SUMS, *_CHOICES, *_FILLED, aten.mul):
        ends = [*node.args, *node.kwargs.values()]
    else:
        return []
    return [float(abs(end)) for end in ends if isinstance(end, int | float) and LARGEST < abs(end) < LIMIT]


def _way(start: Node) -> _Way | None:
    """What reads ``start`` up to a softmax; None where anything else reads it."""
    way, found = _Way(), [start]
    if packet_of(start) is aten.mul:
        way.factors |= _factors(start)
    while found:
        node = found.pop()
        if node in way.reached:
            continue
        way.reached.add(node)
        for user in node.users:
            if packet_of(user) in _SILENT or _ends(user, node):
                continue
            if not _is_float(user) or not _passes(user, node):
                return None
            if packet_of(user) is aten.mul:
                way.factors |= _factors(user) - {node}
            found.append(user)
    return way


def _factors(product: Node) -> set[Node]:
    """What a product multiplies, a stored number aside."""
    values = {node: node.meta.get("val") for node in product.all_input_nodes}
    return {node for node, value in values.items() if node.op != "get_attr" or value is None or value.numel() > 1}


def _ends(user: Node, mask: Node) -> bool:
    """Whether a softmax, or what gives 0 as well, takes the mask."""
    if packet_of(user) is aten.scaled_dot_product_attention:
        return mask not in user.args[:3]
    return packet_of(user) in _ENDS


def _passes(user: Node, mask: Node) -> bool:
    """Whether what an operator gives is still a mask, or scores with one."""
    if packet_of(user) in _PRODUCTS:
        return user.args[0] is mask if packet_of(user) is aten.div else user.args[0] is not user.args[1]
    return packet_of(user) in (*_SUMS, *_CHOICES, *_MOVES, aten.constant_pad_nd)


def _cut(graph: GraphModule, nodes: set[Node]) -> GraphModule:
    """A copy of a graph, with the same tensors, in which ``nodes`` bring in half's limit at most."""
    made = GraphModule(graph, copy.deepcopy(graph.graph))
    for old, node in list(zip(graph.graph.nodes, made.graph.nodes, strict=True)):
        if old not in nodes:
            continue
        if node.op == "get_attr":
            name = f"{node.name}_in_half"
            made.register_buffer(name, within(operator.attrgetter(str(node.target))(graph).detach(), torch.float16))
            node.target = name
        else:
            node.args = tuple(within(value, torch.float16) for value in node.args)
            node.kwargs = {key: within(value, torch.float16) for key, value in node.kwargs.items()}
    made.recompile()
    return made


class _Truths(Interpreter):
    """Runs a graph and notes which of some nodes hold anything but 0, 1 and −1."""

    def __init__(self, graph: GraphModule, watched: set[Node]) -> None:
        super().__init__(graph)
        self.watched, self.others = watched, set[str]()

    def run_node(self, n: Node) -> Any:
        """Runs one node."""
        value = super().run_node(n)
        if n in self.watched and not bool(((value == 0) | (value == 1) | (value == -1)).all()):
            self.others.add(n.name)
        return value


def _same(found: Any, wanted: Sequence[Tensor]) -> bool:
    """Whether outputs are ``wanted`` ones but for rounding."""
    for got, want in zip(tensors(found), wanted, strict=True):
        if not want.is_floating_point():
            if not torch.equal(got, want):
                return False
            continue
        finite = want.isfinite()
        peak = float(want.abs().masked_fill(~finite, 0).max()) if want.numel() else 0.0
        if not torch.allclose(got, want, rtol=0, atol=SAME * peak, equal_nan=True):
            return False
    return True
