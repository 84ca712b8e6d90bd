"""Sets the padding of a pointwise convolution with a stride apart, and has a pooling take the positions that it reads.

OpenVINO (2026.4) moves the stride of a 1×1 convolution to what gives its input, and forgets the padding that lies
between: the result has other sizes, in floats and in integers. It moves none past a pooling of windows of one. Grouped
convolutions it leaves as they are. Dequantized integers are padded before, with their zero point: a convolution that
reads padded floats would run in float.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes import pool_pads
from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import constant
from qtool.exporting.passes.strides import is_pointwise, strides_of, take_strides


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions lost their padding and stride."""
    misread = [node for node in model.graph if _is_misread(node)]
    for node in misread:
        padded = _pad(model, node)
        take_strides(model, padded, [node])
        del node.attributes["pads"]
    pool_pads.apply(model)
    return len(misread)


def _is_misread(node: ir.Node) -> bool:
    pads, groups = node.attributes.get_ints("pads", []), node.attributes.get_int("group", 1)
    return is_pointwise(node) and any(pads) and groups == 1 and max(strides_of(node), default=1) > 1


def _pad(model: ir.Model, conv: ir.Node) -> ir.Value:
    """What a convolution reads behind a padding of its own, for it alone."""
    value, pads, name = conv.inputs[0], list(conv.attributes.get_ints("pads")), conv.name or conv.outputs[0].name
    assert value is not None
    rank, source = len(pads) // 2, value.producer()
    amounts = constant(model, f"{name}/pads", np.array([0, 0, *pads[:rank], 0, 0, *pads[rank:]]))
    if source is None or source.op_type != DEQUANTIZE:
        made = [ir.node("Pad", [value, amounts], name=f"{name}/pad")]
    else:
        integers, scale, *zero = source.inputs
        pad = ir.node("Pad", [integers, amounts, *zero], name=f"{name}/pad")
        assert integers is not None
        pad.outputs[0].name, pad.outputs[0].dtype = f"{name}/pad/integers", integers.dtype
        made = [pad, ir.node(DEQUANTIZE, [pad.outputs[0], scale, *zero], name=f"{name}/pad/dequantize")]
    padded = made[-1].outputs[0]
    padded.name, padded.dtype = f"{name}/padded", value.dtype
    model.graph.insert_before(conv, made)
    conv.replace_input_with(0, padded)
    return padded
