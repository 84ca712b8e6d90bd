"""Quantizes an image by channel, in one operator or in none.

What stands for bytes is written as ``round((x + h) / s) + (z − Z)`` with numbers for each channel, and a quantizer of
scale 1 and zero point Z behind it (``graphs/pixels.py``). QuantizeLinear along the axis of channels computes the same
integers, with a shift before it where there is one:

    saturate(round((x + h) / s) + z).

A channel more of one number is put to the integers and not to the floats. Of a uint8 that is cast to floats, scale 1
and zero point 0 make what it was: it is read as it is.

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
    found, pad = qparams(quantize), _pad_before(quantize)
    chain = _chain(quantize.inputs[0] if pad is None else pad.inputs[0])
    if chain is None or found is None or found[0] != 1 or found[2] != 0:
        return False
    shift, divided, rounded, added = chain
    step, offset, fraction = (node.inputs[1].const_value.numpy() for node in (divided, added, shift))
    zeros = offset.ravel() + found[1]
    if zeros.min() < 0 or zeros.max() > np.iinfo(np.uint8).max or (zeros != zeros.round()).any():
        return False
    name = quantize.name or str(quantize.outputs[0].name)
    image = shift.outputs[0] if fraction.any() else shift.inputs[0]
    quantize.replace_input_with(0, image)
    shape = () if zeros.size == 1 else (-1,)
    quantize.replace_input_with(1, constant(model, f"{name}/scales", step.reshape(shape)))
    quantize.replace_input_with(2, constant(model, f"{name}/zero_points", zeros.astype(np.uint8).reshape(shape)))
    if shape:
        quantize.attributes["axis"] = ir.AttrInt64("axis", AXIS)
    if pad is not None:
        _pad_integers(model, quantize, pad, found[1])
    unread = [*([] if pad is None else [pad]), added, rounded, divided, *([] if fraction.any() else [shift])]
    model.graph.remove(unread, safe=True)
    if not zeros.any() and (step == 1).all():
        _read_bytes(model, quantize)
    return True


def _pad_before(quantize: ir.Node) -> ir.Node | None:
    """What puts a channel to what a quantizer alone reads."""
    value = quantize.inputs[0]
    pad = value.producer() if value is not None else None
    if value is None or pad is None or pad.op_type != "Pad" or len(value.uses()) > 1 or value.is_graph_output():
        return None
    stored = all(given is not None and given.const_value is not None for given in pad.inputs[1:3])
    return pad if stored and len(pad.inputs) == 3 else None


def _chain(value: ir.Value | None) -> tuple[ir.Node, ir.Node, ir.Node, ir.Node] | None:
    """The sum, quotient, rounding and sum, each read once, that a value is, by stored numbers; first to last."""
    found: list[ir.Node] = []
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


def _pad_integers(model: ir.Model, quantize: ir.Node, pad: ir.Node, zero: int) -> None:
    """Puts behind a quantizer of scale 1 what stands before it."""
    integers, image = quantize.outputs[0], quantize.inputs[0]
    number = pad.inputs[2].const_value.numpy() if pad.inputs[2] is not None and pad.inputs[2].const_value else 0
    full = constant(model, f"{quantize.name}/inside", np.uint8(np.clip(np.rint(number) + zero, 0, 255)))
    made = ir.node("Pad", [integers, pad.inputs[1], full], name=f"{quantize.name}/channel")
    made.outputs[0].name, made.outputs[0].dtype, made.outputs[0].shape = made.name, ir.DataType.UINT8, integers.shape
    integers.shape = image.shape if image is not None else None
    model.graph.insert_after(quantize, made)
    integers.replace_all_uses_with(made.outputs[0])
    made.replace_input_with(0, integers)


def _read_bytes(model: ir.Model, quantize: ir.Node) -> None:
    """Takes out a quantizer that gives the bytes that its input was cast from."""
    cast = quantize.inputs[0].producer() if quantize.inputs[0] is not None else None
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    if source is not None and source.dtype == ir.DataType.UINT8:
        quantize.outputs[0].replace_all_uses_with(source)
        model.graph.remove(quantize, safe=True)
        if cast is not None and not cast.outputs[0].uses():
            model.graph.remove(cast, safe=True)
