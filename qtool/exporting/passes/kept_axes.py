"""Has a mean keep its axes until the numbers are at hand, where a quantizer reads it.

OpenVINO (2026.4) moves the scale and zero point of a product of integers that has no bias behind the mean that reads
it, and forgets the zero point where the mean drops its axes: a classifier behind ``linear(x).mean(1)`` then gives other
numbers altogether (−11 dB). A mean that keeps them, with a Squeeze behind it, is right.
"""

from __future__ import annotations

import onnx_ir as ir


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many means keep their axes."""
    means = [node for node in model.graph if node.op_type == "ReduceMean" and _drops_axes(node)]
    for node in means:
        _keep(model, node)
    return len(means)


def _drops_axes(node: ir.Node) -> bool:
    result = node.outputs[0]
    is_read = any(user.op_type == "QuantizeLinear" for user in result.consumers()) and not result.is_graph_output()
    return node.attributes.get_int("keepdims", 1) == 0 and is_read and len(node.inputs) > 1


def _keep(model: ir.Model, node: ir.Node) -> None:
    result = node.outputs[0]
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
    squeeze = ir.node("Squeeze", [result, node.inputs[1]], name=f"{node.name or result.name}/squeeze")
    flat = squeeze.outputs[0]
    flat.name, flat.dtype, flat.shape = f"{result.name}/squeezed", result.dtype, result.shape
    result.shape = None
    for use in list(result.uses()):
        if use.node is not squeeze:
            use.node.replace_input_with(use.idx, flat)
    model.graph.insert_after(node, squeeze)
