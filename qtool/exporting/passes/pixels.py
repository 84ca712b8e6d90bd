"""Quantizes an image by channel, in one operator.

What stands for bytes is written as ``round((x + h) / s) + (z − Z)`` with numbers for each channel, and a quantizer of
scale 1 and zero point Z behind it (``qtool/pixels.py``). QuantizeLinear along the axis of channels computes the same
integers, with a shift before it where there is one:

    saturate(round((x + h) / s) + z).

Left as they are: zero points that are no uint8.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.activations import qparams
from qtool.exporting.passes.parts import constant

AXIS = 1


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many quantizers work by channel now."""
    return sum(_rewrite(model, node) for node in list(model.graph) if node.op_type == "QuantizeLinear")


def _rewrite(model: ir.Model, quantize: ir.Node) -> bool:
    chain = _chain(quantize)
    found = qparams(quantize)
    if chain is None or found is None or found[0] != 1 or found[2] != 0:
        return False
    shift, divided, rounded, added = chain
    step, offset, fraction = (node.inputs[1].const_value.numpy() for node in (divided, added, shift))
    zeros = offset.ravel() + found[1]
    if zeros.min() < 0 or zeros.max() > np.iinfo(np.uint8).max or (zeros != zeros.round()).any():
        return False
    name = quantize.name or str(quantize.outputs[0].name)
    quantize.replace_input_with(0, shift.outputs[0] if fraction.any() else shift.inputs[0])
    shape = () if zeros.size == 1 else (-1,)
    quantize.replace_input_with(1, constant(model, f"{name}/scales", step.reshape(shape)))
    quantize.replace_input_with(2, constant(model, f"{name}/zero_points", zeros.astype(np.uint8).reshape(shape)))
    if shape:
        quantize.attributes["axis"] = ir.AttrInt64("axis", AXIS)
    model.graph.remove([added, rounded, divided, *([] if fraction.any() else [shift])], safe=True)
    return True


def _chain(quantize: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node, ir.Node] | None:
    """The sum, quotient, rounding and sum that a quantizer alone reads, first to last, by stored numbers each."""
    found: list[ir.Node] = []
    value = quantize.inputs[0]
    for kind in ("Add", "Round", "Div", "Add"):
        node = value.producer() if value is not None else None
        if node is None or value is None or node.op_type != kind or len(value.uses()) != 1 or value.is_graph_output():
            return None
        if kind != "Round" and (node.inputs[1] is None or node.inputs[1].const_value is None):
            return None
        found.append(node)
        value = node.inputs[0]
    last, rounded, divided, first = found
    return first, divided, rounded, last
