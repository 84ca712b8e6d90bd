"""Keeps a quantizer behind what it rounds where numbers are joined along another axis than their channels.

OpenVINO (2026.4) rounds the parts of a Concat instead of the whole. Each part then has a scale and zero point of its
own and the whole one for each place along the axis. Of channels a convolution takes that, and a matrix product of what
it sums over. Of tokens, rows or samples OpenVINO refuses the file at a matrix product, and convolves in float; so it
does with channels that are cut again and have zero points. It moves no quantizer past an Unsqueeze:

    Quantize(Concat(…)) = Squeeze(Quantize(Unsqueeze(Concat(…))))

Parts of one scale and several zero points it takes there for one number, and subtracts the first part's zero point from
all of them. So one part's scale is then the next larger float32, of its quantizer too, which keeps them apart.
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
        _tell_apart(model, node)
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


def _tell_apart(model: ir.Model, quantizer: ir.Node) -> None:
    """Gives one of the parts that are joined another scale, where all have one and their zero points differ."""
    value = quantizer.inputs[0]
    concat = value.producer() if value is not None else None
    parts = [part.producer() for part in (concat.inputs if concat is not None else ()) if part is not None]
    steps = [_step_of(part) for part in parts]
    if not steps or None in steps or len({scale for scale, _ in filter(None, steps)}) > 1:
        return
    part = next((part for part, step in zip(parts, steps, strict=True) if step != steps[0]), None)
    integers = part.inputs[0] if part is not None else None
    source = integers.producer() if integers is not None else None
    if integers is None or source is None or source.op_type != QUANTIZE:
        return
    scale = np.nextafter(np.float32(steps[0][0]), np.float32(np.inf))  # type: ignore[index]
    larger = constant(model, f"{integers.name}/larger_scale", scale)
    for node in (source, *(reader for reader in integers.consumers() if reader.op_type == DEQUANTIZE)):
        node.replace_input_with(1, larger)


def _step_of(part: ir.Node | None) -> tuple[float, int] | None:
    """The scale and the zero point that a part is dequantized with; None where it is otherwise, or has several."""
    if part is None or part.op_type != DEQUANTIZE or part.inputs[1] is None or part.inputs[1].const_value is None:
        return None
    scale, zero = part.inputs[1].const_value.numpy(), zeros_of(part)
    return (float(scale.item()), int(zero.item())) if scale.size == 1 and zero is not None and zero.size == 1 else None


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
