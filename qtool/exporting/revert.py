"""Takes units of a quantized graph back to float: their quantizers go, their weights become numbers again.

What is left of a reverted unit is the operator on float32, with the weights that its integers stood for: they may have
been trained, rounded or corrected as integers, and the float model's own need not fit the others any more. A quantizer
stays where something integer still reads it; what is float reads the value before it. So the reverted graph differs
from the quantized one only in roundings that it does not make.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qtool.exporting.to_onnx import quiet_exporter
from qtool.form import DEQUANTIZE, QUANTIZE, Plan, QuantizedModel, unit_of


def in_float(quantized: QuantizedModel, reasons: Mapping[str, str]) -> QuantizedModel:
    """A copy of ``quantized`` whose units named in ``reasons`` are float, for the reason given there."""
    with quiet_exporter():
        graph = copy.deepcopy(quantized.graph)
    floats = _float_nodes(graph, set(reasons), quantized.plan)
    for node in [node for node in graph.graph.nodes if node.target in QUANTIZE]:
        if node.args[0] in floats or node.args[0].op == "placeholder":
            _read_before(node, floats, set(reasons))
    for node in [node for node in floats if unit_of(node) in reasons]:
        _restore_weights(graph, node)
    graph.graph.eliminate_dead_code()
    _drop_unused(graph)
    graph.recompile()
    units = (
        dataclasses.replace(unit, integer=False, reason=reasons[unit.name], weight_bits=None, block=None)
        if unit.name in reasons
        else unit
        for unit in quantized.plan.units
    )
    return dataclasses.replace(quantized, graph=graph, plan=dataclasses.replace(quantized.plan, units=tuple(units)))


def _float_nodes(graph: GraphModule, reverted: set[str], plan: Plan) -> set[Node]:
    """The operators that compute on floats once ``reverted`` do: those, the plan's own, and moves of floats."""
    own = {unit.name for unit in plan.float_units} | reverted
    known = {unit.name for unit in plan.units}
    floats: set[Node] = set()
    for node in graph.graph.nodes:
        is_size = "custom" not in node.meta
        if node.op != "call_function" or node.target in (*QUANTIZE, *DEQUANTIZE) or is_size:
            continue
        name, source = unit_of(node), node.args[0] if node.args else None
        moves_float = name not in known and isinstance(source, Node) and source.target not in DEQUANTIZE
        if name in own or moves_float:
            floats.add(node)
    return floats


def _read_before(quantizer: Node, floats: set[Node], reverted: set[str]) -> None:
    """Lets float readers have the value in front of a quantizer, where they or what gives it were reverted."""
    source = quantizer.args[0]
    assert isinstance(source, Node)
    concerned = source.op == "call_function" and unit_of(source) in reverted
    for back in [user for user in quantizer.users if user.target in DEQUANTIZE]:
        for reader in list(back.users):
            leaves = reader.op == "output"
            if (reader in floats or leaves) and (concerned or (not leaves and unit_of(reader) in reverted)):
                reader.replace_input_with(back, source)


def _restore_weights(graph: GraphModule, node: Node) -> None:
    for operand in node.all_input_nodes:
        if operand.target not in DEQUANTIZE or any(n.op != "get_attr" for n in operand.all_input_nodes):
            continue
        values = [_constant(graph, arg) if isinstance(arg, Node) else arg for arg in operand.args]
        kept = {k: _constant(graph, v) if isinstance(v, Node) else v for k, v in operand.kwargs.items()}
        assert callable(operand.target)
        name = f"{operand.name}_float"
        graph.register_parameter(name, nn.Parameter(operand.target(*values, **kept).float(), requires_grad=False))
        with graph.graph.inserting_before(operand):
            stored = graph.graph.get_attr(name)
        operand.replace_all_uses_with(stored, delete_user_cb=lambda user: user is node)


def _constant(graph: GraphModule, node: Node) -> torch.Tensor:
    value: object = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.Tensor)
    return value.detach()


def _drop_unused(graph: GraphModule) -> None:
    """Removes constants that no node reads any more."""
    graph.delete_all_unused_submodules()
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [n for n, _ in (*graph.named_parameters(), *graph.named_buffers()) if "." not in n and n not in read]:
        delattr(graph, name)
