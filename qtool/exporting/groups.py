"""Groups of units that may be run in float together: blocks between cuts of the graph, runs and patterns of blocks.

A *cut* is a place that a single tensor crosses. Between two cuts lies a *block*: everything in it leads from one tensor
to one tensor, so turning it to float costs two conversions at most, whatever it holds (a residual branch, a
squeeze-excite gate). Neighbouring blocks share the conversion between them. If block i takes ``c_i(k)`` in the number
format k ∈ {integer, float} and a conversion behind it ``v_i``, the fastest choice of formats is the shortest path

    min Σ_i c_i(k_i) + Σ_i v_i [k_i ≠ k_{i+1}]

which dynamic programming over two states finds. It is a prediction, from kernels that were timed inside two other
files, and only says what is worth a measurement. Blocks of the same operators in the same order are a *pattern* (each
squeeze-excite gate, each SiLU): what a runtime does badly, it does badly everywhere.

Left out on purpose: parts of a block, and graphs that no cut divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE, Plan, unit_of


@dataclass(frozen=True)
class Block:
    """The units between two cuts, what each does, and the elements that one sample's tensor has at the second cut."""

    units: tuple[str, ...]
    kinds: tuple[str, ...]
    elements: int


@dataclass(frozen=True)
class Group:
    """Units to be run in float together, and the seconds that this is predicted to save."""

    name: str
    units: tuple[str, ...]
    saves: float


def blocks(graph: GraphModule, plan: Plan) -> list[Block]:
    """The blocks of a quantized graph, in order; a graph without a cut is one block."""
    kinds = {unit.name: unit.kind for unit in plan.units}
    nodes = [node for node in graph.graph.nodes if _computes(node)]
    found: list[Block] = []
    members: dict[str, None] = {}
    for node, alone in zip(nodes, _cuts(nodes), strict=True):
        members[unit_of(node)] = None
        if alone or node is nodes[-1]:
            names = tuple(members)
            found.append(Block(names, tuple(kinds.get(name, "move") for name in names), _elements(node)))
            members = {}
    return found


def _computes(node: Node) -> bool:
    """Whether a node makes a tensor of floats: conversions, constants and sizes do not count."""
    value = node.meta.get("val")
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return node.op == "call_function" and floats and node.target not in (*QUANTIZE, *DEQUANTIZE)


def _cuts(nodes: Sequence[Node]) -> list[bool]:
    """For each node whether its value alone is needed by what comes after it, and its unit is complete."""
    place = {node: index for index, node in enumerate(nodes)}
    last = dict.fromkeys(nodes, -1)
    for node in nodes:
        for source in filter(None, map(origin, node.all_input_nodes)):
            if source in place:
                last[source] = place[node]
    live: set[Node] = set()
    alone = []
    for index, node in enumerate(nodes):
        live = {value for value in (*live, node) if last[value] > index}
        complete = index + 1 < len(nodes) and unit_of(nodes[index + 1]) != unit_of(node)
        alone.append(live == {node} and complete)
    return alone


def origin(node: Node) -> Node | None:
    """What a value is a quantization of; None for a constant."""
    source: object = node
    while isinstance(source, Node) and source.target in (*QUANTIZE, *DEQUANTIZE):
        source = source.args[0]
    return source if isinstance(source, Node) and source.op != "get_attr" else None


def _elements(node: Node) -> int:
    return math.prod(size for size in node.meta["val"].shape[1:] if isinstance(size, int))


Times = Sequence[tuple[float, float]]


def fastest(times: Times, conversions: Sequence[float]) -> list[bool]:
    """Which blocks to run in float: the shortest path, given (integer, float) seconds and the conversion behind each.

    >>> fastest([(5.0, 2.0), (1.0, 3.0), (1.0, 0.9)], [1.0, 1.0, 1.0])
    [True, False, False]
    """
    best: list[tuple[float, list[bool]]] = [(0.0, []), (0.0, [])]
    for index, costs in enumerate(times):
        step = conversions[index - 1] if index else 0.0
        best = [
            min(((before + cost + (step if was != now else 0.0), [*path, bool(now)])
                 for was, (before, path) in enumerate(best)), key=lambda pair: pair[0])
            for now, cost in enumerate(costs)
        ]  # fmt: skip
    return min(best, key=lambda pair: pair[0])[1]


def candidates(found: Sequence[Block], times: Times, conversions: Sequence[float]) -> list[Group]:
    """The groups that are predicted to save time, the most first: runs of neighbouring blocks, and patterns.

    Conversions are known least, so runs are sought at half, once and twice their cost.
    """
    chosen: dict[tuple[int, ...], None] = {}
    for factor in (0.5, 1.0, 2.0):
        for run in _runs(fastest(times, [cost * factor for cost in conversions])):
            chosen[run] = None
    for kinds in dict.fromkeys(block.kinds for block in found):
        same = tuple(index for index, block in enumerate(found) if block.kinds == kinds)
        if len(kinds) > 1 and len(same) > 1:
            chosen[same] = None
    groups = [_group(found, members, times, conversions) for members in chosen]
    return sorted((g for g in groups if g.saves > 0), key=lambda g: -g.saves)


def _runs(floats: Sequence[bool]) -> list[tuple[int, ...]]:
    """The indices of each unbroken run of float blocks."""
    runs: list[list[int]] = []
    for index, is_float in enumerate(floats):
        if is_float and index and floats[index - 1]:
            runs[-1].append(index)
        elif is_float:
            runs.append([index])
    return [tuple(run) for run in runs]


def _group(found: Sequence[Block], members: tuple[int, ...], times: Times, conversions: Sequence[float]) -> Group:
    inside = set(members)
    saved = sum(times[i][0] - times[i][1] for i in members)
    borders = [i for i in range(len(found) - 1) if (i in inside) != (i + 1 in inside)]
    units = tuple(name for i in members for name in found[i].units)
    consecutive = len(members) == members[-1] - members[0] + 1
    name = f"{units[0]} … {units[-1]}" if len(units) > 1 else units[0]
    if not consecutive:
        name = f"{len(members)} × {' → '.join(found[members[0]].kinds)}"
    return Group(name, units, saved - 0.5 * sum(conversions[i] for i in borders))


def kernel_seconds(kernels: Sequence[tuple[str, float]], plan: Plan, found: Sequence[Block]) -> list[float]:
    """Seconds by block, of a file's kernels (name, seconds) in order of execution.

    A fused kernel bears the name of one of its operators, which is a unit's or a module's; one that the runtime
    added (a reordering) counts with the kernel before it.
    """
    place = {name: index for index, block in enumerate(found) for name in block.units}
    names: Mapping[str, str] = {m: u.name for u in plan.units for m in reversed(u.modules)}
    seconds, here = [0.0] * len(found), 0
    for name, took in kernels:
        own = stem(name)
        here = place.get(own, place.get(names.get(own, ""), here))
        seconds[here] += took
    return seconds


def stem(kernel: str) -> str:
    """The unit or module that an optimised graph's kernel is called after.

    >>> stem("2.body.0.0_nchwc"), stem("1/QuickGeluFusion/"), stem("0.0_token_2")
    ('2.body.0.0', '1', '0.0')
    """
    base = kernel.partition("/")[0]
    while (shorter := base.removesuffix("_nchwc").removesuffix("_nhwc").removesuffix("_quant")) != base:
        base = shorter
    head, token, number = base.rpartition("_token_")
    return stem(head) if token and number.isdigit() else base
