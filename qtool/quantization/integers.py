"""The last step of every engine: biases become int32, and every quantizer learns whose it is.

A runtime's integer kernel adds the bias to the int32 accumulator, whose unit is ``s_x·s_w``. Writing the
bias as ``round(b / (s_x·s_w))`` behind a dequantize makes the graph say what the kernel does. A channel
whose weights are nearly zero has a tiny ``s_w``, and its bias may not fit: then ``s_w`` is raised until the
bias takes 2³⁰ steps, which leaves half of the accumulator for the products; the channel's weights were
too small to matter beside such a bias. Each such channel is named in the plan's notes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE, padding_of, quantized
from qtool.graphs.edits import drop_unused, parameter, remove_identities, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten, output_axis
from qtool.quantization.rewrites.constants import fold_computed
from qtool.quantization.targets import MOVES, Target

MAX_BIAS = 2.0**30
WEIGHTED = (*CONVOLUTIONS, aten.linear.default)


def finish(graph_module: GraphModule, target: Target) -> tuple[str, ...]:
    """Makes biases int32 and moves bare where the target wants it, and labels quantizers, all in place.

    Returns notes on channels that were changed.
    """
    notes: list[str] = []
    remove_identities(graph_module)
    drop_requantization(graph_module)
    fold_computed(graph_module)
    for node in list(graph_module.graph.nodes):
        if target.integer_bias and node.target in WEIGHTED and _is_integer_unit(node):
            notes += _integer_bias(graph_module, node)
    if target.bare_moves:
        drop_pairs(graph_module)
    label(graph_module)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    drop_unused(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()
    return tuple(notes)


def drop_requantization(graph_module: GraphModule) -> None:
    """Drops a quantize that repeats the one before it: of a dequantized value, with the same parameters."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not quantized.quantize_per_tensor.default:
            continue
        source = node.args[0]
        if source.target is quantized.dequantize_per_tensor.default and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def drop_pairs(graph_module: GraphModule) -> None:
    """Drops each pair behind operators that only move the numbers of an equal pair.

    OpenVINO rounds again for each that has a zero point. The others it drops itself, but late: the keys of attention
    are then moved to where they lie turned, which a product could have read as they were (2 % of a ViT-S/16's time at
    batch 32). From opset 21 on ONNX Runtime 1.31 cannot do without those: it puts a pair there itself, says in its
    ``output_dtype`` that it is int8, makes its zero point uint8 and refuses what it made.
    """
    for node in list(graph_module.graph.nodes):
        is_quantizer = node.target is quantized.quantize_per_tensor.default
        if not is_quantizer or node.args[0].target not in MOVES:
            continue
        source = node.args[0]
        while source.target in MOVES:
            source = source.args[0]
        if source.target is quantized.dequantize_per_tensor.default and source.args[1:] == node.args[1:]:
            for reader in list(node.users):
                reader.replace_all_uses_with(node.args[0])
    graph_module.graph.eliminate_dead_code()


def _is_integer_unit(node: Node) -> bool:
    source, weight = _quantized_input(node), node.args[1]
    return (
        isinstance(weight, Node)
        and source.target is quantized.dequantize_per_tensor.default
        and weight.target is quantized.dequantize_per_channel.default
    )


def _quantized_input(node: Node) -> Node:
    """What dequantizes the input of a layer, behind the padding that is its own."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = source.args[0] if padding_of(source) is not None else source
    return before if isinstance(before, Node) else source


def _integer_bias(graph_module: GraphModule, node: Node) -> list[str]:
    bias_node = node.args[2] if len(node.args) > 2 else None
    if not (isinstance(bias_node, Node) and bias_node.op == "get_attr"):
        return []
    source, weight = _quantized_input(node), node.args[1]
    assert isinstance(weight, Node)
    scale_x = float(str(source.args[1]))
    scales, bias = parameter(graph_module, weight.args[1]), parameter(graph_module, bias_node)
    assert scales is not None
    assert bias is not None
    notes = []
    steps = bias.double() / (scale_x * scales.double())
    crowded = steps.abs() > MAX_BIAS
    if bool(crowded.any()):
        scales = _raise_scales(graph_module, node, weight, bias, scale_x, crowded)
        steps = bias.double() / (scale_x * scales.double())
        channels = [str(int(index)) for index in crowded.nonzero().flatten()]
        notes = [
            f"{node.meta.get('unit', node.name)}: weight scale raised in nearly dead channels "
            f"{', '.join(channels[:8])}{' …' if len(channels) > 8 else ''} so that the int32 bias fits"
        ]
    _replace_bias(graph_module, node, torch.round(steps), (scale_x * scales.double()).float())
    return notes


def _raise_scales(
    graph_module: GraphModule, node: Node, weight: Node, bias: Tensor, scale_x: float, crowded: Tensor
) -> Tensor:
    """Gives the crowded channels the least scale at which their bias fits; the weight becomes the operator's own."""
    scales, integers = parameter(graph_module, weight.args[1]), parameter(graph_module, weight.args[0])
    assert scales is not None
    assert integers is not None
    least = (bias.double().abs() / (scale_x * MAX_BIAS)).float() * 1.001
    raised = torch.where(crowded, least.copysign(scales), scales)
    shape = [1] * integers.dim()
    shape[output_axis(node)] = -1
    rescaled = torch.round(integers.double() * (scales.double() / raised.double()).reshape(shape))
    for index, (name, value) in enumerate((("weight", rescaled.to(integers.dtype)), ("weight_scale", raised))):
        weight.update_arg(index, store_before(graph_module, weight, f"{node.name}_{name}", value))
    return raised


def store_before(graph_module: GraphModule, before: Node, name: str, value: Tensor) -> Node:
    """A new constant of the graph, read before a node. Named after an operator, which alone reads it."""
    set_parameter(graph_module, name, value)
    with graph_module.graph.inserting_before(before):
        return graph_module.graph.get_attr(name)


def _replace_bias(graph_module: GraphModule, node: Node, steps: Tensor, scale: Tensor) -> None:
    values = {
        "integer": steps.to(torch.int32),
        "scale": scale,
        "zero_point": torch.zeros(len(scale), dtype=torch.int64),
    }
    stored = [store_before(graph_module, node, f"{node.name}_bias_{name}", value) for name, value in values.items()]
    limits = torch.iinfo(torch.int32)
    with graph_module.graph.inserting_before(node):
        dequantized = graph_module.graph.call_function(
            quantized.dequantize_per_channel.default, (*stored, 0, limits.min, limits.max, torch.int32)
        )
    node.update_arg(2, dequantized)


def label(graph_module: GraphModule) -> None:
    """Writes into each node's ``meta['custom']`` the unit it belongs to, which survives saving and export."""
    units = {str(node.meta["unit"]) for node in graph_module.graph.nodes if "unit" in node.meta}
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"unit": _unit_of(node, units)}


def _is_part_of_unit(node: Node) -> bool:
    """Whether a node is one of several results of a unit."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and "unit" in source.meta


def _unit_of(node: Node, units: set[str]) -> str:
    """What a node is called after: its unit, or else its module, or its operator there if a unit has that name.

    What dequantizes a constant is called after its first reader.
    """
    if "unit" in node.meta:
        return str(node.meta["unit"])
    if node.target in DEQUANTIZE and node.users and all(source.op == "get_attr" for source in node.all_input_nodes):
        return _unit_of(next(iter(node.users)), units)
    source: Any = node
    while isinstance(source, Node) and (source.target in (*QUANTIZE, *DEQUANTIZE) or _is_part_of_unit(source)):
        source = source.args[0]
    if isinstance(source, Node) and source.op == "call_function":
        name = str(source.meta.get("unit", source.meta.get("owner") or source.name))
        free = "unit" in source.meta or name not in units
        return name if free else f"{name}.{str(source.target).removeprefix('aten.').partition('.')[0]}"
    return str(getattr(source, "target", node.name))
