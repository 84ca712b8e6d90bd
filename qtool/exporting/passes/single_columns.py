"""Takes the stride along the columns off convolutions whose results have one column.

On CPUs with AMX, OpenVINO (2026.4) gets results of one column and several rows wrong where windows of several columns
have a stride along them, in integers and in bfloat16, which it takes for floats unless told otherwise (-2 dB; see
:mod:`qtool.runtimes.onednn`). Over a single column there is nothing to stride: the same window reads the same numbers
once the columns that it never came to are cut off, those of the padding first.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import constant
from qtool.exporting.passes.strides import strides_of


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions lost that stride."""
    changed = 0
    for node in list(model.graph):
        unread = _unread(node)
        if unread is not None:
            node.attributes["strides"] = ir.AttrInt64s("strides", [*strides_of(node)[:-1], 1])
            _cut(model, node, unread)
            changed += 1
    return changed


def _unread(node: ir.Node) -> int | None:
    """How many columns lie behind the window of a convolution of one column; None of any other operator."""
    if node.op_type != "Conv" or strides_of(node)[-1:] in ([], [1]):
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    before, behind, weight = (value.shape for value in (node.inputs[0], node.outputs[0], node.inputs[1]) if value)
    if before is None or behind is None or weight is None:
        return None
    columns, result, taps = before[-1], behind[-1], weight[-1]
    if not isinstance(columns, int) or result != 1 or not isinstance(taps, int):
        return None
    pads, dilations = node.attributes.get_ints("pads", [0, 0]), node.attributes.get_ints("dilations", [1])
    unread: int = columns + pads[len(pads) // 2 - 1] + pads[-1] - (taps - 1) * dilations[-1] - 1
    return unread


def _cut(model: ir.Model, conv: ir.Node, unread: int) -> None:
    """Takes so many columns off the end of what a convolution reads."""
    pads = list(conv.attributes.get_ints("pads", []))
    off = min(unread, pads[-1]) if pads else 0
    if off:
        pads[-1] -= off
        conv.attributes["pads"] = ir.AttrInt64s("pads", pads)
    value = conv.inputs[0]
    assert value is not None
    assert value.shape is not None
    if off == unread:
        return
    name = f"{conv.name or conv.outputs[0].name}/read"
    rest = {"from": 0, "to": off - unread, "axis": len(value.shape) - 1}
    numbers = [constant(model, f"{name}/{part}", np.array([number])) for part, number in rest.items()]
    cut = ir.node("Slice", [value, *numbers], name=name)
    made = cut.outputs[0]
    made.name, made.dtype = name, value.dtype
    *others, columns = value.shape
    made.shape = ir.Shape([*others, int(str(columns)) + off - unread])
    model.graph.insert_before(conv, cut)
    conv.replace_input_with(0, made)
