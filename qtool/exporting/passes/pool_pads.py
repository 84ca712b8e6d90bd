"""Names the axes of a Pad in front of a MaxPool.

ONNX Runtime (1.31) makes such a padding the pool's own, whatever number it writes: a MaxPool knows nothing of what it
pads with, so that a window of negative numbers beside zeros no longer gives 0 (42 dB behind a SiLU). A Pad that names
its axes is left where it is. One with minus infinity is what a MaxPool's own padding is, and may go.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import constant


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many paddings name their axes now."""
    paddings = [node for node in model.graph if _is_taken(node)]
    for node in paddings:
        amounts = node.inputs[1]
        assert amounts is not None
        assert amounts.const_value is not None
        node.resize_inputs(4)
        name = f"{node.outputs[0].name}/axes"
        node.replace_input_with(3, constant(model, name, np.arange(amounts.const_value.size // 2)))
    return len(paddings)


def _is_taken(node: ir.Node) -> bool:
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return False
    amounts, value, axes = ([*node.inputs[1:], None, None, None])[:3]
    if axes is not None or amounts is None or amounts.const_value is None:
        return False
    number = value.const_value.numpy() if value is not None and value.const_value is not None else np.zeros(())
    return not np.isneginf(number).all() and any(user.op_type == "MaxPool" for user in node.outputs[0].consumers())
