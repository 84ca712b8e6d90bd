"""Writes a zero Pad in front of a convolution into the convolution's own ``pads``.

The quantized form pads what a dequantizer gives, and a runtime fuses a convolution with dequantizers directly in
front of it. ``Conv`` of ONNX pads both ends of each axis by amounts of their own, so that nothing is lost:

    Conv(Pad(x, begins + ends), pads = p) = Conv(x, pads = p + (begins + ends)).

Left out on purpose: other modes and values, amounts below zero, paddings of the batch or the channels, ``auto_pad``.
"""

from __future__ import annotations

import onnx_ir as ir


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions pad by themselves now."""
    changed = 0
    for node in list(model.graph):
        pad = node.inputs[0].producer() if node.op_type == "Conv" and node.inputs[0] is not None else None
        amounts = _amounts(pad) if pad is not None and pad.op_type == "Pad" else None
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
    amounts, value, axes = ([*pad.inputs[1:], None, None, None])[:3]
    if pad.attributes.get_string("mode", "constant") != "constant" or amounts is None or amounts.const_value is None:
        return None
    if axes is not None or (value is not None and (value.const_value is None or value.const_value.numpy().any())):
        return None
    given = [int(amount) for amount in amounts.const_value.numpy()]
    rank = len(given) // 2
    outer = (*given[:2], *given[rank : rank + 2])
    return [*given[2:rank], *given[rank + 2 :]] if min(given) >= 0 and not any(outer) else None
