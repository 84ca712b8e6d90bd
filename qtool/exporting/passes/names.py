"""Names that a reader of the graph recognises: values and nodes are called after the module they come from.

A unit's operators are ``<unit>`` (the first) and ``<unit>/<operator>``, its quantizer gives ``<unit>/quantized``, and
what reads that gives ``<unit>/dequantized``. Weights become ``<unit>/weight``, their scales ``<unit>/weight_scale``.
The model's outputs are ``output``, or ``output_0`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PARAMETERS = {1: "weight", 2: "bias"}
_SUFFIXES = ("", "_scale", "_zero_point")


def apply(model: ir.Model, units: Mapping[str, str]) -> int:
    """Renames in place; ``units`` maps the exporter's name of a value to its unit. Returns the nodes renamed."""
    taken = {value.name for value in model.graph.inputs if value.name}
    nodes: set[str] = set()
    renamed = 0
    _name_outputs(model, units, taken)
    for node in model.graph:
        unit = units.get(node.outputs[0].metadata_props.pop("unit", node.outputs[0].name or ""))
        if unit is None or _reads_constant(node):
            continue
        _name_node(node, unit, taken, nodes)
        renamed += 1
    for node in model.graph:
        if node.op_type in WEIGHTED:
            _name_parameters(node, taken)
    return renamed


def _name_outputs(model: ir.Model, units: Mapping[str, str], taken: set[str]) -> None:
    """Names the outputs, leaving each node a note of what the exporter called its value."""
    outputs = list(model.graph.outputs)
    for index, value in enumerate(outputs):
        if value.is_graph_input() or value.name in taken:
            continue
        if value.name in units:
            value.metadata_props["unit"] = value.name
        value.name = _unique("output" if len(outputs) == 1 else f"output_{index}", taken)


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
        producer = value.producer()
        if producer is None:
            _name_constant(value, stem, taken)
        elif _reads_constant(producer):
            producer.name = f"{stem}/dequantize"  # one reader, so as unique as the reader's own name
            value.name = _unique(f"{stem}/dequantized", taken)
            for constant, suffix in zip(producer.inputs, _SUFFIXES, strict=False):
                if constant is not None:
                    _name_constant(constant, stem + suffix, taken)


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
