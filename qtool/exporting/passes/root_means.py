"""Writes an RMSNorm so that ONNX Runtime fuses it: as a division.

torch's exporter writes ``x · rsqrt(mean(x²) + ε)`` as a product with a reciprocal. ONNX Runtime has one kernel for

    y = x / sqrt(mean(x²) + ε) · w

(``SimplifiedLayerNormalization``) and looks for the division; what it does not find takes seven operators and three
times as long. Left as it is: what is no mean of x² over the last axis, or not of the x that is divided.
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many norms divide."""
    changed = 0
    for node in list(model.graph):
        for source, factor in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
            root = _root(source, factor)
            if root is not None:
                _divide(model.graph, node, [source, root])
                changed += 1
                break
    if changed:
        drop_unused(model)
    return changed


def _root(source: ir.Value | None, factor: ir.Value | None) -> ir.Value | None:
    """The root of a value's mean square whose reciprocal a factor is; None where it is another."""
    reciprocal = _maker(factor, "Reciprocal")
    root = reciprocal.inputs[0] if reciprocal is not None else None
    total = _maker(_first(_maker(root, "Sqrt")), "Add")
    means = [mean for value in (total.inputs if total is not None else ()) if (mean := _maker(value, "ReduceMean"))]
    power = _maker(_first(means[0]), "Pow") if means and _is_over_last(means[0]) else None
    exponent = power.inputs[1].const_value if power is not None and power.inputs[1] is not None else None
    squares = power is not None and power.inputs[0] is source and exponent is not None and (exponent.numpy() == 2).all()
    return root if squares else None


def _maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The operator of this type that gives a value, if one does."""
    made = value.producer() if value is not None else None
    return made if made is not None and made.op_type == op_type else None


def _first(node: ir.Node | None) -> ir.Value | None:
    return node.inputs[0] if node is not None else None


def _is_over_last(mean: ir.Node) -> bool:
    """Whether a mean is over the last axis alone, and keeps it."""
    source, axes = mean.inputs[0], mean.inputs[1] if len(mean.inputs) > 1 else None
    if source is None or source.shape is None or axes is None or axes.const_value is None:
        return False
    last = [int(axis) % len(source.shape) for axis in axes.const_value.numpy()] == [len(source.shape) - 1]
    return last and mean.attributes.get_int("keepdims", 1) == 1


def _divide(graph: ir.Graph, product: ir.Node, parts: list[ir.Value | None]) -> None:
    """Puts a division of these two in the place of a product, and takes out the reciprocal that it read."""
    divided, result = ir.node("Div", parts, name=product.name), product.outputs[0]
    made, read = divided.outputs[0], product.inputs
    made.name, made.dtype, made.shape = result.name, result.dtype, result.shape
    ir.convenience.replace_nodes_and_values(graph, product, [product], [divided], product.outputs, divided.outputs)
    for reciprocal in filter(None, (_maker(value, "Reciprocal") for value in read)):
        if not reciprocal.outputs[0].uses():
            graph.remove(reciprocal, safe=True)
