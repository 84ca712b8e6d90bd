"""Keeps a quantizer behind what it rounds where numbers are joined along another axis than their channels.

OpenVINO (2026.4) rounds the parts of a Concat instead of the whole. Each part then has a scale and zero point of its
own and the whole one for each place along the axis. Of channels a convolution takes that, and a matrix product of what
it sums over. Of tokens, rows or samples OpenVINO refuses the file at a matrix product, and convolves in float; so it
does with channels that are cut again and have zero points. It moves no quantizer past an Unsqueeze:

    Quantize(Concat(…)) = Squeeze(Quantize(Unsqueeze(Concat(…))))
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.names import DEQUANTIZE, QUANTIZE
from qtool.exporting.passes.parts import MOVES, constant, is_read, zeros_of

_PRODUCTS = ("MatMul", "Gemm")
_CUTS = ("Slice", "Split", "Gather")
_THROUGH = (DEQUANTIZE, *MOVES)


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many quantizers behind a Concat are kept there."""
    kept = [node for node in model.graph if node.op_type == QUANTIZE and _is_moved(node)]
    for node in kept:
        _keep(model, node)
    return len(kept)


def _is_moved(quantizer: ir.Node) -> bool:
    value = quantizer.inputs[0]
    concat = value.producer() if value is not None else None
    if value is None or concat is None or concat.op_type != "Concat" or value.shape is None:
        return False
    rank = len(value.shape)
    channels = rank - 1 if is_read(quantizer, _PRODUCTS, _THROUGH) else 1
    if concat.attributes["axis"].as_int() % rank != channels:
        return True
    zeros = zeros_of(quantizer)
    return zeros is not None and bool(zeros.any()) and is_read(quantizer, _CUTS, _THROUGH)


def _keep(model: ir.Model, quantizer: ir.Node) -> None:
    value, integers = quantizer.inputs[0], quantizer.outputs[0]
    assert value is not None
    assert value.shape is not None
    axes = constant(model, f"{integers.name}/axes", np.array([-1]))
    raised = ir.node("Unsqueeze", [value, axes], name=f"{integers.name}/unsqueeze")
    lowered = ir.node("Squeeze", [integers, axes], name=f"{integers.name}/squeeze")
    for node, like in ((raised, value), (lowered, integers)):
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = f"{node.name}d", like.dtype, like.shape
    integers.replace_all_uses_with(lowered.outputs[0])
    lowered.replace_input_with(0, integers)
    quantizer.replace_input_with(0, raised.outputs[0])
    raised.outputs[0].shape = integers.shape = ir.Shape([*value.shape, 1])
    model.graph.insert_before(quantizer, raised)
    model.graph.insert_after(quantizer, lowered)
