"""Int32 biases as runtimes expect them: a DequantizeLinear without a zero point.

ONNX allows only zero there for int32, and ONNX Runtime's convolution fusion wants the input absent.
"""

from __future__ import annotations

import onnx_ir as ir


def apply(model: ir.Model) -> int:
    """Drops the zero point of every dequantized int32 constant, in place; returns how many."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or len(node.inputs) < 3 or node.inputs[0] is None:
            continue
        if node.inputs[0].dtype == ir.DataType.INT32:
            node.resize_inputs(2)
            changed += 1
    drop_unused(model)
    return changed


def drop_unused(model: ir.Model) -> None:
    """Removes the constants that no node reads, in place."""
    for name, value in list(model.graph.initializers.items()):
        if not value.consumers() and not value.is_graph_output():
            del model.graph.initializers[name]
