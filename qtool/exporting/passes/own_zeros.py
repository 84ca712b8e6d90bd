"""Gives each quantized activation a zero point of its own, where an exporter stores equal constants once.

OpenVINO (2026.4) moves a zero point behind the sum that reads it and multiplies it by how many numbers are added up:
in the constant itself, so that whatever else had the same zero point was off by as much (−15 dB).
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE, QUANTIZE
from qtool.exporting.passes.parts import constant, unmoved


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many quantizers and dequantizers have another constant."""
    owners: dict[ir.Value, ir.Value] = {}
    copies: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    changed = 0
    for node in model.graph:
        integers, zero = _integers(node), node.inputs[2] if len(node.inputs) > 2 else None
        if integers is None or zero is None or zero.const_value is None or zero.const_value.size != 1:
            continue
        if owners.setdefault(zero, integers) is not integers:
            if (zero, integers) not in copies:
                name = f"{integers.name}/zero_point"
                copies[zero, integers] = constant(model, name, zero.const_value.numpy().copy())
            node.replace_input_with(2, copies[zero, integers])
            changed += 1
    drop_unused(model)
    return changed


def _integers(node: ir.Node) -> ir.Value | None:
    """What a quantizer gives, or a dequantizer reads, before it was moved; None of a constant and other nodes."""
    if node.op_type == QUANTIZE:
        return node.outputs[0]
    value = unmoved(node.inputs[0]) if node.op_type == DEQUANTIZE else None
    return value if value is not None and value.const_value is None else None
