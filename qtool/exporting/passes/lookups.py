"""Lookups in integer tables: the rows asked for are dequantized, not the whole table in every run.

``Gather(DequantizeLinear(table, scale), ids)`` becomes ``Cast(Gather(table, ids)) · Gather(scale, ids)``: the same
products of the same numbers. Matrices that are looked up to be multiplied (an expert's, for each token) are larger than
what they are multiplied by and than the result, of which one is scaled in their place, in two thirds of the time:

    (s ∘ W) x = s ∘ (W x),    x (s ∘ W) = (x ∘ sᵀ) W
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused


def apply(model: ir.Model) -> int:
    """Rewrites in place each lookup along the first axis of a dequantized constant; returns how many."""
    changed = 0
    for node in list(model.graph):
        table = _dequantized_table(node)
        if table is not None:
            _rewrite(model.graph, node, table)
            changed += 1
    drop_unused(model)
    return changed


def _dequantized_table(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear, one scale for each row, that a lookup reads; None where there is none."""
    if node.op_type != "Gather" or _axis(node, 0) != 0 or node.inputs[0] is None:
        return None
    source = node.inputs[0].producer()
    if source is None or source.op_type != "DequantizeLinear" or _axis(source, 1) != 0 or source.inputs[0] is None:
        return None
    return source if source.inputs[0].is_initializer() and source.inputs[0].dtype == ir.DataType.INT8 else None


def _axis(node: ir.Node, default: int) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else default


def _rewrite(graph: ir.Graph, node: ir.Node, table: ir.Node) -> None:
    name, (integers, scales) = node.outputs[0].name, table.inputs[:2]
    product = _product(node)
    is_right = product is not None and product.inputs[1] is node.outputs[0]
    axis = ir.Value(name=f"{name}/axis", const_value=ir.tensor([-2 if is_right else -1], dtype=ir.DataType.INT64))
    axis.shape, axis.dtype = ir.Shape([1]), ir.DataType.INT64
    graph.register_initializer(axis)
    rows = ir.node("Gather", [integers, node.inputs[1]])
    steps = ir.node("Gather", [scales, node.inputs[1]])
    factors = ir.node("Unsqueeze", [steps.outputs[0], axis])
    real = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
    graph.insert_before(node, [rows, steps, factors, real])
    if product is None:
        scaled = real.outputs[0]
    else:
        ir.convenience.replace_all_uses_with(node.outputs[0], real.outputs[0])
        scaled = product.inputs[0] if is_right else product.outputs[0]
    multiply = ir.node("Mul", [scaled, factors.outputs[0]])
    for index, made in enumerate((rows, steps, factors, real, multiply)):
        made.name = made.outputs[0].name = f"{name}/{made.op_type.lower()}_{index}"
    if product is None:
        ir.convenience.replace_nodes_and_values(graph, node, [node], [multiply], node.outputs, multiply.outputs)
    elif is_right:
        graph.insert_before(product, multiply)
        product.replace_input_with(0, multiply.outputs[0])
    else:
        graph.insert_after(product, multiply)
        ir.convenience.replace_all_uses_with(scaled, multiply.outputs[0])
        multiply.replace_input_with(0, scaled)
    if product is not None:
        graph.remove(node, safe=True)
    if not table.outputs[0].consumers():
        graph.remove(table, safe=True)


def _product(node: ir.Node) -> ir.Node | None:
    """The product of matrices that alone reads the rows of a lookup, with other than a vector; None where none does."""
    (result,) = node.outputs
    readers = [reader for reader, _ in result.uses()]
    if result.is_graph_output() or len(readers) != 1 or readers[0].op_type != "MatMul":
        return None
    (product,) = readers
    ranks = [0 if value is None or value.shape is None else len(value.shape) for value in product.inputs]
    return product if min(ranks) > 1 and not product.outputs[0].is_graph_output() else None
