"""Sums of squares, exponentials and many numbers: what half precision's range is too small for.

Half precision ends at 65,504, which is the square of 256, and begins at 6e-8, above many an epsilon. So a norm written
out, x / sqrt(Σx² + ε), a softmax by hand, a mean over what a mask leaves, a variance as E[x²] − E[x]², overflow or
divide by 0, though what they give is within it. As autocast does, such a sum, what is squared for it, and what is made
of it alone up to where it meets other values, stay in float32: tensors that are small mostly, and two that need not be.
Averages of plain values are within the range of these, and are left.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.operators import aten, packet_of

_N = TypeVar("_N")


class Kind(enum.Enum):
    """What an operator is to a sum."""

    SUM = enum.auto()
    """It adds up, or squares for itself: what it gives, or makes on the way, may leave the range."""
    AVERAGE = enum.auto()
    """It makes of many numbers fewer ones within their range, unless these are powers."""
    POWER = enum.auto()
    """It makes squares, other powers or exponentials, value by value."""
    PRODUCT = enum.auto()
    """It multiplies, value by value."""
    POINTWISE = enum.auto()
    """It computes value by value in another way, or moves."""
    OTHER = enum.auto()


_REDUCING = (Kind.SUM, Kind.AVERAGE)


def wide_sums(nodes: Iterable[_N], reads: Callable[[_N], Iterable[_N]], kind: Callable[[_N], Kind]) -> set[_N]:
    """The nodes that are to stay in float32; ``nodes`` come in an order in which each stands behind what it reads.

    ``reads`` leaves out constants, and what holds no floats, sizes above all.
    """
    kinds: dict[_N, Kind] = {}
    sources: dict[_N, list[_N]] = {}
    users: dict[_N, list[_N]] = defaultdict(list)
    reduced: set[_N] = set()  # what is made of sums and averages alone
    waiting: list[_N] = []
    for node in nodes:
        kinds[node], sources[node] = kind(node), list(reads(node))
        for source in sources[node]:
            users[source].append(node)
        reduces = kinds[node] in _REDUCING
        if reduces or (kinds[node] is not Kind.OTHER and sources[node] and reduced.issuperset(sources[node])):
            reduced.add(node)
        if kinds[node] is Kind.SUM or (reduces and any(kinds[source] is Kind.POWER for source in sources[node])):
            waiting.append(node)
    kept: set[_N] = set()
    small: set[_N] = set()
    while waiting:
        if (node := waiting.pop()) in small:
            continue
        small.add(node)
        if kinds[node] in _REDUCING:
            grown = (Kind.POWER, Kind.PRODUCT) if kinds[node] is Kind.SUM else (Kind.POWER,)
            kept.update(source for source in sources[node] if kinds[source] in grown)
        else:
            waiting += (source for source in sources[node] if source in reduced)
        kept.update(user for user in users[node] if kinds[user] is not Kind.OTHER)
        waiting += (user for user in users[node] if user in reduced)
    return kept | small


def reached(
    nodes: Iterable[_N], reads: Callable[[_N], Iterable[_N]], starts: Callable[[_N], bool], kind: Callable[[_N], Kind],
    rounds: Callable[[_N], bool],
) -> set[_N]:  # fmt: skip
    """The nodes where values beyond the range start, and those they go on to value by value, up to what ends that.

    What ends it (a maximum, a comparison, a norm) is one of them, unless it ``rounds`` what it reads, as layers do.
    """
    found: set[_N] = set()
    through: set[_N] = set()
    for node in nodes:
        begins = starts(node)
        if begins or (not through.isdisjoint(reads(node)) and not rounds(node)):
            found.add(node)
            if begins or kind(node) is not Kind.OTHER:
                through.add(node)
    return found


_SUMS = (
    aten.sum, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.linalg_vector_norm, aten.norm, aten.cumsum,
    aten.logsumexp, aten.logcumsumexp, aten.nansum, aten.scatter_add, aten.index_add,
)  # fmt: skip
_POINTWISE = (
    aten.add, aten.sub, aten.rsub, aten.div, aten.sqrt, aten.rsqrt, aten.reciprocal, aten.clamp, aten.clamp_min,
    aten.clamp_max, aten.maximum, aten.minimum, aten.log, aten.log2, aten.log10, aten.log1p, aten.neg, aten.abs,
    aten.reshape, aten.view, aten.unsqueeze, aten.squeeze, aten.expand, aten.expand_as, aten.clone, aten.where,
    aten.masked_fill,
)  # fmt: skip


def sums(graph: GraphModule) -> set[Node]:
    """The nodes of a captured graph that are to stay in float32, their constants of one number among them."""

    def reads(node: Node) -> list[Node]:
        return [one for one in node.all_input_nodes if one.op != "get_attr" and _is_float32(one)]

    kept = wide_sums(graph.graph.nodes, reads, kind_of)
    constants = {one for node in kept for one in node.all_input_nodes if one.op == "get_attr" and _is_number(one)}
    return kept | constants


def kind_of(node: Node) -> Kind:
    """What a node of a captured graph is to a sum."""
    packet = packet_of(node)
    if not _is_float32(node):
        return Kind.OTHER
    if packet in _SUMS or (packet is aten.index_put and True in node.args[3:]):  # it accumulates
        return Kind.SUM
    if packet is aten.mean or (packet is aten.adaptive_avg_pool2d and node.args[1] in ([1, 1], (1, 1))):
        return Kind.AVERAGE
    if packet in (aten.pow, aten.exp, aten.square) or (packet is aten.mul and node.args[0] is node.args[1]):
        return Kind.POWER
    return Kind.PRODUCT if packet is aten.mul else Kind.POINTWISE if packet in _POINTWISE else Kind.OTHER


def _is_float32(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1
