"""Finding one captured graph's operators in another capture of the same computation.

Two captures of one model, one with quantizers and one without, hold the same operators, but nodes have
other names and the order of independent branches may differ. Operators are matched by what they are and
by what they read: walking the first graph, each operator is found in the second among those of the same
kind whose operands are the matched operands; where several read the same, the module path decides, then the
order. Quantize and dequantize count as the value they carry, constants (weights and what is computed
from them) are not compared.

A matched pair of graphs lets one placement, made on the float graph, name the units of the quantized graph
and prove that its quantizers are where the placement wants them.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE, quantized
from qtool.graphs.edits import owner
from qtool.graphs.operators import aten
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.rewrites.constants import constant_nodes

_CARRIERS = (*QUANTIZE, *DEQUANTIZE, aten.alias.default)


class Misaligned(Exception):
    """The graphs do not hold the same operators, or the quantizers are elsewhere; the text says where."""


def value_of(node: Any) -> Any:
    """The node whose value ``node`` carries: quantize, dequantize and alias stand for what they are applied to."""
    while isinstance(node, Node) and node.target in _CARRIERS:
        node = node.args[0]
    return node


def align(reference: GraphModule, other: GraphModule) -> dict[Node, Node]:
    """The node of ``other`` for each input and operator of ``reference``.

    Both are captured graphs of the same inputs. Raises Misaligned when an operator has no counterpart, or
    ``other`` computes something more.
    """
    constants = constant_nodes(reference) | constant_nodes(other)
    inputs = [[n for n in g.graph.nodes if n.op == "placeholder"] for g in (reference, other)]
    if len(inputs[0]) != len(inputs[1]):
        raise Misaligned(f"{len(inputs[1])} inputs, not {len(inputs[0])}")
    pairs = dict(zip(*inputs, strict=True))
    waiting = _by_key(other, constants)
    for node in _operators(reference, constants):
        key = (node.target, tuple(pairs.get(v, v) for v in _reads(node, constants)))
        candidates = waiting.get(key)
        if not candidates:
            raise Misaligned(f"operator '{node.name}' ({_describe(node)}) is not there, or reads something else")
        pairs[node] = _best(node, candidates)
        candidates.remove(pairs[node])
    if rest := [n for nodes in waiting.values() for n in nodes]:
        raise Misaligned(f"operator '{rest[0].name}' ({_describe(rest[0])}) is one too many")
    return pairs


def _operators(graph_module: GraphModule, constants: set[Node]) -> list[Node]:
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target not in _CARRIERS and node not in constants
    ]


def _reads(node: Node, constants: set[Node]) -> list[Node]:
    return [value_of(n) for n in node.all_input_nodes if n not in constants]


def _by_key(graph_module: GraphModule, constants: set[Node]) -> dict[Any, list[Node]]:
    found: dict[Any, list[Node]] = {}
    for node in _operators(graph_module, constants):
        found.setdefault((node.target, tuple(_reads(node, constants))), []).append(node)
    return found


def _best(node: Node, candidates: list[Node]) -> Node:
    path = owner(node)
    same = [c for c in candidates if owner(c) == path or owner(c).startswith(path + ".")]
    return (same or candidates)[0]


def _describe(node: Node) -> str:
    return f"{str(node.target).removeprefix('aten.')} in module '{owner(node)}'"


def label_units(placement: Placement, pairs: dict[Node, Node]) -> None:
    """Writes each unit's name, and each operator's module path, on the matched nodes."""
    for node, match in pairs.items():
        if node.op == "call_function":
            match.meta["owner"] = owner(node)
    for placed in placement.placed:
        for node in placed.nodes:
            if node in pairs and placed.pattern is not None:
                pairs[node].meta["unit"] = placed.unit.name


def check_quantizers(placement: Placement, pairs: dict[Node, Node]) -> None:
    """Raises Misaligned unless the matched graph quantizes exactly what the placement says, and as it says."""
    wanted = {pairs[node] for node in quantized_values(placement)}
    for match in pairs.values():
        quantizers = [user for user in match.users if user.target is quantized.quantize_per_tensor.default]
        if bool(quantizers) != (match in wanted):
            raise Misaligned(f"a quantizer is {'missing' if match in wanted else 'too many'} after '{match.name}'")
    for placed in placement.placed:
        if placed.pattern is not None:
            _check_unit(placed, pairs)


def _check_unit(placed: Placed, pairs: dict[Node, Node]) -> None:
    match = pairs[placed.anchor]
    assert placed.pattern is not None
    if placed.pattern.weighted:
        weight = match.args[1]
        if not (isinstance(weight, Node) and weight.target is quantized.dequantize_per_channel.default):
            raise Misaligned(f"the weight of '{placed.unit.name}' is not quantized")
    if placed.pattern.shares and len({_qparams(pairs[n]) for n in (placed.operands[0], placed.output)}) > 1:
        raise Misaligned(f"'{placed.unit.name}' changes the scale of what it only moves")


def _qparams(node: Node) -> tuple[Any, ...]:
    for user in node.users:
        if user.target is quantized.quantize_per_tensor.default:
            return tuple(user.args[1:])
    return ()


def quantized_values(placement: Placement) -> set[Node]:
    """The values of the placement's own graph that get a quantizer: outputs of units, and what units read."""
    found = set()
    for placed in placement.placed:
        if placed.pattern is not None:
            found.update(placed.operands)
            if placed.quantized_output:
                found.add(placed.output)
    return found
