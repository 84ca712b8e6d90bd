"""Stores a constant in the type that it is read in.

torch keeps zero points in 64 bits and casts them. Its exporter computes such a cast beforehand up to 8,192 numbers
only: the layer behind a larger vocabulary, or one of as many classes, would have zero points that are computed.
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant


def apply(model: ir.Model) -> int:
    """Replaces casts of integer constants to other integers by constants, in place; returns how many."""
    changed = 0
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Cast" else None
        result = node.outputs[0]
        if source is None or source.const_value is None or result.is_graph_output():
            continue
        to = ir.DataType(node.attributes["to"].as_int())
        if not (source.const_value.dtype.is_integer() and to.is_integer()):
            continue
        value = constant(model, str(result.name), source.const_value.numpy().astype(to.numpy()))
        result.replace_all_uses_with(value)
        model.graph.remove(node, safe=True)
        changed += 1
    drop_unused(model)
    return changed
