"""Zero padding in front of a convolution becomes part of it.

Frameworks that pad unevenly (TensorFlow's "same" at stride 2) write the padding as an operator of its own. Placement
makes it a unit that shares its input's quantizer, so that the graph reads

    q → dequantize → pad with 0 → quantize → dequantize → convolution,

both quantizers of one meaning. Zero is an integer of that meaning, its zero point, so quantizing what was padded gives
back the integers that there were, and the padding: the second pair changes nothing. It is dropped, and the padding
belongs to the convolution's unit, which a runtime pads by itself (``exporting/passes/conv_pads.py``).

Left out on purpose: paddings of batch or channels, with other values, or read by anything but convolutions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import GraphModule, Node

from qtool.form import Plan, padding_of, quantized
from qtool.graphs.operators import aten

RANKS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
PAIR = (quantized.quantize_per_tensor.default, quantized.dequantize_per_tensor.default)


def absorb(graph_module: GraphModule, plan: Plan) -> Plan:
    """Gives paddings to the convolutions that read them, in place; returns the plan without their units."""
    absorbed: dict[str, list[str]] = {}
    for node in list(graph_module.graph.nodes):
        convolutions = _convolutions(node)
        for convolution in convolutions:
            _own_padding(node, convolution)
            absorbed.setdefault(str(node.meta["unit"]), []).append(str(convolution.meta["unit"]))
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return _without(plan, absorbed)


def _convolutions(node: Node) -> list[Node]:
    """The convolutions that read this padding, each through quantizers of its input's meaning; none if any other do."""
    amounts = padding_of(node)
    source = node.args[0] if amounts is not None else None
    if not (isinstance(source, Node) and source.target is PAIR[1]) or not node.users:
        return []
    found = list(node.users)
    for target in PAIR:
        if any(reader.target is not target or reader.args[1:] != source.args[1:] for reader in found):
            return []
        values, found = found, [user for reader in found for user in reader.users]
    return found if all(_pads_space(reader, values, len(amounts or ())) for reader in found) else []


def _pads_space(reader: Node, values: list[Node], amounts: int) -> bool:
    """Whether one of ``values`` is what this convolution, of a unit, convolves, in all axes that are padded."""
    return (
        2 * RANKS.get(reader.target, 0) >= amounts
        and reader.args[0] in values
        and not any(operand in values for operand in reader.args[1:])
        and "unit" in reader.meta
    )


def _own_padding(node: Node, convolution: Node) -> None:
    with convolution.graph.inserting_before(convolution):
        own = convolution.graph.node_copy(node)
    own.meta["unit"] = convolution.meta["unit"]
    convolution.update_arg(0, own)


def _without(plan: Plan, absorbed: dict[str, list[str]]) -> Plan:
    """The plan without the absorbed units, whose modules are among those of their convolutions."""
    modules = {unit.name: unit.modules for unit in plan.units}
    more: dict[str, tuple[str, ...]] = {}
    for pad, convolutions in absorbed.items():
        for name in convolutions:
            more[name] = (*more.get(name, ()), *modules.get(pad, ()))
    units = tuple(
        dataclasses.replace(unit, modules=(*more[unit.name], *unit.modules)) if unit.name in more else unit
        for unit in plan.units
        if unit.name not in absorbed
    )
    return dataclasses.replace(plan, units=units)
