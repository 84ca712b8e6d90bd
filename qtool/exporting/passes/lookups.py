"""Lookups in integer tables: the rows asked for are dequantized, not the whole table in every run.

``Gather(DequantizeLinear(table, scale), ids)`` becomes ``Cast(Gather(table, ids)) · Gather(scale, ids)``: the same
products of the same numbers.
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
    integers, scales = table.inputs[:2]
    rows = ir.node("Gather", [integers, node.inputs[1]])
    steps = ir.node("Gather", [scales, node.inputs[1]])
    axis = ir.Value(name=f"{node.outputs[0].name}/axis", const_value=ir.tensor([-1], dtype=ir.DataType.INT64))
    axis.shape, axis.dtype = ir.Shape([1]), ir.DataType.INT64
    graph.register_initializer(axis)
    column = ir.node("Unsqueeze", [steps.outputs[0], axis])
    real = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
    product = ir.node("Mul", [real.outputs[0], column.outputs[0]])
    new = [rows, steps, column, real, product]
    for index, made in enumerate(new[:-1]):
        made.outputs[0].name = f"{node.outputs[0].name}/{made.op_type.lower()}_{index}"
        made.name = made.outputs[0].name
    graph.insert_before(node, new)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [product], node.outputs, product.outputs)
    if not table.outputs[0].consumers():
        graph.remove(table, safe=True)
