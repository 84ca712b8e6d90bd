"""Takes a product with stored weights before the batch is moved, not after: Transpose · MatMul → MatMul · Transpose.

A layer over T × N × C behind a transposition from N × T × C multiplies each row by the same matrix, so the order of the
two makes no difference. ONNX Runtime 1.31 takes such a transposition into the product, and where both are float16 and
the right operand has fewer dimensions it then ends the process on a CPU; half-precision files are kept free of that
pair. What cannot be turned round, because the right operand is computed or the batch becomes the summed dimension, is
named.
"""

from __future__ import annotations

import onnx_ir as ir


def apply(model: ir.Model) -> list[str]:
    """Rewrites in place; returns the names of the products that still read a moved batch."""
    products = [node for node in model.graph if node.op_type == "MatMul" and _is_misread(node)]
    for node in products:
        if _is_layer(node):
            _swap(model, node)
    return [str(node.name) for node in products if _is_misread(node)]


def _is_misread(product: ir.Node) -> bool:
    """Whether the left operand is a moved batch, and the right one not known to have as many dimensions."""
    turn, right = _turn(product), product.inputs[1]
    if turn is None or not _moves_batch(turn):
        return False
    known = right is not None and right.shape is not None
    return not known or len(right.shape) < len(turn.attributes.get_ints("perm", ()))


def _turn(product: ir.Node) -> ir.Node | None:
    """The transposition of a product's left operand."""
    producer = product.inputs[0].producer() if product.inputs[0] is not None else None
    return producer if producer is not None and producer.op_type == "Transpose" else None


def _moves_batch(turn: ir.Node) -> bool:
    """Whether the first dimension becomes the last but one or the last, with the others in their order."""
    order = list(turn.attributes.get_ints("perm", ()))
    rest = [axis for axis in order if axis]
    return len(order) > 2 and order.index(0) >= len(order) - 2 and rest == sorted(rest)


def _is_layer(product: ir.Node) -> bool:
    weight, turn = product.inputs[1], _turn(product)
    assert turn is not None
    kept = turn.attributes.get_ints("perm", ())[-1] != 0
    return kept and weight is not None and weight.is_initializer() and len(weight.shape or ()) == 2


def _swap(model: ir.Model, product: ir.Node) -> None:
    turn, result = _turn(product), product.outputs[0]
    assert turn is not None
    early = ir.node("MatMul", [turn.inputs[0], product.inputs[1]], name=product.name)
    late = ir.node("Transpose", [early.outputs[0]], turn.attributes, name=f"{product.name}/turned")
    early.outputs[0].name, early.outputs[0].dtype = f"{result.name}/unturned", result.dtype
    ir.convenience.replace_nodes_and_values(model.graph, product, [product], [early, late], [result], late.outputs)
    if not turn.outputs[0].uses() and not turn.outputs[0].is_graph_output():
        model.graph.remove(turn, safe=True)
