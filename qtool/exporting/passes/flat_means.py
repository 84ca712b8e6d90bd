"""Takes means and sums over sequences as over pictures of one row.

OpenVINO (2026.4) reads behind the end of a tensor of three axes where it takes a mean or sum of integers, or of what
integers were convolved to: with few samples the numbers are right, and with more than there are channels (or more than
one, of tokens that are told in float) they are of whatever lies there, −13 to 6 dB and NaN. Of four axes all are right:

    mean(x, axis) = mean(x[:, :, None], axis)[:, :, 0].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import constant

_RANK, _ROW = 3, 2


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many means and sums have an axis more."""
    flat = [node for node in model.graph if _is_flat(node)]
    for node in flat:
        _widen(model, node)
    return len(flat)


def _is_flat(node: ir.Node) -> bool:
    if node.op_type not in ("ReduceMean", "ReduceSum", "GlobalAveragePool"):
        return False
    value, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    known = node.op_type == "GlobalAveragePool" or (axes is not None and axes.const_value is not None)
    return known and value is not None and value.shape is not None and len(value.shape) == _RANK


def _widen(model: ir.Model, node: ir.Node) -> None:
    """Puts a row in front of the last axis, and takes it away behind the node."""
    value, result, name = node.inputs[0], node.outputs[0], node.name or node.outputs[0].name
    assert value is not None
    assert value.shape is not None
    place, shape = constant(model, f"{name}/row", np.array([_ROW])), list(value.shape)
    before = ir.node("Unsqueeze", [value, place], name=f"{name}/with_row")
    wide = before.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{name}/with_row", value.dtype, ir.Shape([*shape[:_ROW], 1, *shape[_ROW:]])
    model.graph.insert_before(node, before)
    node.replace_input_with(0, wide)
    if node.op_type != "GlobalAveragePool":
        place = _move_axes(model, node, place)
    after = ir.node("Squeeze", [result, place], name=f"{name}/without_row")
    made = after.outputs[0]
    result.name, made.name, made.dtype, made.shape = f"{name}/row_of_one", result.name, result.dtype, result.shape
    result.shape = None
    ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
    after.replace_input_with(0, result)
    model.graph.insert_after(node, after)


def _move_axes(model: ir.Model, node: ir.Node, row: ir.Value) -> ir.Value:
    """Has a reduction take the axes where they are now; returns where the row is in its result."""
    name, given = node.name or node.outputs[0].name, node.inputs[1]
    assert given is not None
    assert given.const_value is not None
    axes = sorted(int(axis) % _RANK for axis in given.const_value.numpy().reshape(-1))
    moved = np.array([axis + (axis >= _ROW) for axis in axes])
    node.replace_input_with(1, constant(model, f"{name}/axes", moved))
    dropped = 0 if node.attributes.get_int("keepdims", 1) else sum(axis < _ROW for axis in axes)
    return constant(model, f"{name}/row_behind", np.array([_ROW - dropped])) if dropped else row
