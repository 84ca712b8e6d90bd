"""Pads integers instead of the numbers that they stand for: the dequantizer before a Pad moves behind it.

``0.0`` is the integer ``zero_point``, so padding the integers with it and dequantizing gives the padded numbers.
Only a Pad between a dequantizer and quantizers of the same meaning is rewritten; then that pair is idle, and a
runtime drops it. The pad's other modes copy numbers of the input and need no value.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.activations import qparams


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many paddings work on integers now."""
    return sum(on_integers(model, node) for node in list(model.graph) if node.op_type == "Pad")


def on_integers(model: ir.Model, node: ir.Node) -> bool:
    """Has one padding work on integers, in place, if what is around it allows that; returns whether it does."""
    found = _between_same(node)
    if found:
        _rewrite(model, node)
    return found


def _between_same(node: ir.Node) -> bool:
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    users = node.outputs[0].consumers()
    if source is None or source.op_type != "DequantizeLinear" or not users or node.outputs[0].is_graph_output():
        return False
    meaning = qparams(source)
    same = all(user.op_type == "QuantizeLinear" and qparams(user) == meaning for user in users)
    return meaning is not None and same and _pads_with_zero(node)


def _pads_with_zero(node: ir.Node) -> bool:
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if node.attributes.get_string("mode", "constant") != "constant" or value is None:
        return True
    return value.const_value is not None and not np.any(value.const_value.numpy())


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    source, result = node.inputs[0].producer() if node.inputs[0] is not None else None, node.outputs[0]
    assert source is not None
    integers, scale, zero = source.inputs[:3]
    assert integers is not None
    padded = ir.node("Pad", [integers, node.inputs[1], zero, *node.inputs[3:]], node.attributes, name=node.name)
    padded.outputs[0].name, padded.outputs[0].dtype = f"{result.name}/integers", integers.dtype
    restored = ir.node("DequantizeLinear", [padded.outputs[0], scale, zero], name=f"{node.name}/restored")
    restored.outputs[0].name, restored.outputs[0].dtype = f"{result.name}/restored", ir.DataType.FLOAT
    padded.outputs[0].shape = restored.outputs[0].shape = result.shape
    model.graph.insert_before(node, [padded, restored])
    for user in result.consumers():
        user.replace_input_with(0, restored.outputs[0])
        _spare(user, restored.outputs[0])
    model.graph.remove(node, safe=True)
    if not source.outputs[0].consumers() and not source.outputs[0].is_graph_output():
        model.graph.remove(source, safe=True)


def _spare(quantizer: ir.Node, restored: ir.Value) -> None:
    """Lets all readers but the first of an idle pair read in front of it: a runtime drops one with one reader only."""
    reads = [use for pair in quantizer.outputs[0].consumers() for use in pair.outputs[0].uses()]
    for node, index in reads[1:]:
        node.replace_input_with(index, restored)
