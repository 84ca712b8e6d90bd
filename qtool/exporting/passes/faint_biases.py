"""Gives integer convolutions without a bias one that is next to nothing, where several operators read the results.

OpenVINO (2026.4) multiplies by the scale of such a convolution where it is needed, and with an open batch once too
often or not at all where a sum is fused into the convolution and something else reads the result too:

    y + f(y),  y = s · (W ∗ x)

came to f(y) and next to nothing of y (0 dB: the patches of a PoolFormer, whose biases are 0). Where a bias is added the
scale stays in front of it. 10⁻³⁰ is lost in any result but 0, and a bias of 0 is left out by OpenVINO itself.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.names import QUANTIZE
from qtool.exporting.passes.parts import constant, integer_taps

FAINT = np.float32(1e-30)


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions got a bias."""
    found = [node for node in model.graph if integer_taps(node) is not None]
    bare = [node for node in found if not _has_bias(node) and _parts(node.outputs[0])]
    for node in bare:
        _shift(model, node)
    return len(bare)


def _shift(model: ir.Model, conv: ir.Node) -> None:
    result, name = conv.outputs[0], f"{conv.outputs[0].name}/bias"
    shift = ir.node("Add", [result, constant(model, f"{name}/faint", FAINT)], name=name)
    made = shift.outputs[0]
    result.name, made.name, made.dtype, made.shape = f"{name}/none", result.name, result.dtype, result.shape
    ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
    shift.replace_input_with(0, result)
    model.graph.insert_after(conv, shift)


def _has_bias(conv: ir.Node) -> bool:
    """Whether a convolution adds numbers that are not all 0, or that are not stored."""
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    source = bias.producer() if bias is not None else None
    stored = source.inputs[0] if source is not None else bias
    return stored is not None and (stored.const_value is None or bool(stored.const_value.numpy().any()))


def _parts(value: ir.Value) -> bool:
    """Whether several operators read a value, or what is made of it by one, and not all of them round it."""
    readers = list(value.consumers())
    if len(readers) + value.is_graph_output() > 1:
        return any(reader.op_type != QUANTIZE for reader in readers)
    return any(reader.op_type != QUANTIZE and any(map(_parts, reader.outputs)) for reader in readers)
