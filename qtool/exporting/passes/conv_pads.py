"""Writes a zero Pad in front of a convolution into the convolution's own ``pads``.

The quantized form pads what a dequantizer gives, and a runtime fuses a convolution with dequantizers directly in
front of it. ``Conv`` of ONNX pads both ends of each axis by amounts of their own, so that nothing is lost:

    Conv(Pad(x, begins + ends), pads = p) = Conv(x, pads = p + (begins + ends)).

Left out on purpose: other modes and values, amounts below zero, paddings of the batch or the channels, ``auto_pad``.
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.parts import zero_padding


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions pad by themselves now."""
    changed = 0
    for node in list(model.graph):
        pad = node.inputs[0].producer() if node.op_type == "Conv" and node.inputs[0] is not None else None
        amounts = _amounts(pad) if pad is not None else None
        if pad is None or amounts is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            continue
        own = list(node.attributes.get_ints("pads", [0] * len(amounts)))
        node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, amounts, strict=True)])
        node.replace_input_with(0, pad.inputs[0])
        if not pad.outputs[0].consumers() and not pad.outputs[0].is_graph_output():
            model.graph.remove(pad, safe=True)
        changed += 1
    return changed


def _amounts(pad: ir.Node) -> list[int] | None:
    """What a Pad adds to the spatial axes, begins and then ends; None where it is no padding of these with zeros."""
    given = zero_padding(pad)
    if given is None or given.min() < 0 or given[:, :2].any():
        return None
    return [int(amount) for amount in given[:, 2:].ravel()]
