"""Names that a reader of the graph recognises: values and nodes are called after the module they come from.

A unit's operators are ``<unit>`` (the first) and ``<unit>/<operator>``, its quantizer gives ``<unit>/quantized``, and
what reads that gives ``<unit>/dequantized``. Weights become ``<unit>/weight``, their scales ``<unit>/weight_scale``.
The model's outputs are called what the model calls them (``logits``), or ``output``, or ``output_0`` and so on. In a
node's ``meta`` stands its ``unit``, for passes to read.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from qtool.graphs.lstm import OPERATOR

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
RECURRENT = ("LSTM", "GRU", "RNN", OPERATOR)
_SCOPES = "pkg.torch.onnx.name_scopes"
_PARAMETERS = {1: "weight", 2: "bias"}
_SUFFIXES = ("", "_scale", "_zero_point")


def apply(model: ir.Model, units: Mapping[str, str], outputs: Sequence[str | None] = ()) -> int:
    """Renames in place; ``units`` maps the exporter's name of a value to its unit. Returns the nodes renamed.

    ``outputs`` are the outputs' own names, None for one without; of another number than the outputs they are not used.
    """
    found = {node: unit for node in model.graph if (unit := units.get(_source(node))) is not None}
    for node, unit in found.items():
        node.meta["unit"] = unit
    named = {node: unit for node, unit in found.items() if not _reads_constant(node)}
    taken, nodes = _kept(model, named)
    _name_outputs(model, taken, outputs)
    for node, unit in named.items():
        _name_node(node, unit, taken, nodes)
    for node in model.graph:
        if node.op_type in WEIGHTED:
            _name_parameters(node, taken)
    return len(named)


def _source(node: ir.Node) -> str:
    """The graph's node that a node gives the value of, or, of a recurrent layer, that it was translated from."""
    if node.op_type not in RECURRENT:
        return node.outputs[0].name or ""
    return str(ast.literal_eval(node.metadata_props.get(_SCOPES, "['']"))[-1])


def _kept(model: ir.Model, named: Mapping[ir.Node, str]) -> tuple[set[str], set[str]]:
    """Names of values and of nodes that stay the exporter's, in inner graphs too, where no unit is called so."""
    units, inputs = set(named.values()), {value.name for value in model.graph.inputs if value.name}
    others = [node for node in model.graph.all_nodes() if node not in named]
    values = [*model.graph.initializers.values(), *(value for node in others for value in node.outputs)]
    for holder in (*others, *values):
        if holder.name in units:
            holder.name = f"{holder.name}/other"
    return inputs | {value.name for value in values if value.name}, {node.name for node in others if node.name}


def _name_outputs(model: ir.Model, taken: set[str], own: Sequence[str | None]) -> None:
    outputs = list(model.graph.outputs)
    own = own if len(own) == len(outputs) else [None] * len(outputs)
    for index, value in enumerate(outputs):
        if value.is_graph_input() or value in outputs[:index]:
            continue
        value.name = _unique(own[index] or ("output" if len(outputs) == 1 else f"output_{index}"), taken)


def _name_node(node: ir.Node, unit: str, taken: set[str], nodes: set[str]) -> None:
    """Nodes and values have names of their own: an input may be called as a unit is."""
    if node.op_type == QUANTIZE:
        base, value = f"{unit}/quantize", f"{unit}/quantized"
    elif node.op_type == DEQUANTIZE:
        base, value = f"{unit}/dequantize", f"{unit}/dequantized"
    else:
        base = unit if unit not in nodes else f"{unit}/{node.op_type.lower()}"
        value = base if base not in taken else f"{base}/output"
    node.name = _unique(base, nodes)
    if not node.outputs[0].is_graph_output():
        node.outputs[0].name = _unique(value, taken)


def _reads_constant(node: ir.Node) -> bool:
    source = node.inputs[0] if node.inputs else None
    return node.op_type == DEQUANTIZE and source is not None and source.is_initializer()


def _name_parameters(node: ir.Node, taken: set[str]) -> None:
    """Calls constants after the operator that reads them, directly or behind a dequantize."""
    for position, word in _PARAMETERS.items():
        value = node.inputs[position] if position < len(node.inputs) else None
        if value is None or not node.name:
            continue
        stem = f"{node.name}/{word}"
        producer = _before_groups(value.producer())
        if producer is None:
            _name_constant(value, stem, taken)
        elif _reads_constant(producer):
            producer.name = f"{stem}/dequantize"  # one reader, so as unique as the reader's own name
            producer.outputs[0].name = _unique(f"{stem}/dequantized", taken)
            for constant, suffix in zip(producer.inputs, _SUFFIXES, strict=False):
                if constant is not None:
                    _name_constant(constant, stem + suffix, taken)


def _before_groups(node: ir.Node | None) -> ir.Node | None:
    """What makes the groups that a reshape joins to a weight; any other node itself."""
    source = node.inputs[0].producer() if node is not None and node.op_type == "Reshape" and node.inputs[0] else None
    return source if source is not None and _reads_constant(source) else node


def _name_constant(value: ir.Value, name: str, taken: set[str]) -> None:
    if value.is_initializer() and len(value.uses()) == 1 and not value.is_graph_output():
        value.name = _unique(name, taken)


def _unique(name: str, taken: set[str]) -> str:
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    return unique
