"""Weights that are only stored in bytes: dequantized once, as the file is opened, and not in every run.

ONNX Runtime computes what depends on constants alone before the first run, with the exception of DequantizeLinear, by
which it knows its integer kernels. Before a layer that has no such kernel it would run every time, and a recurrent
layer would not find constants to pack: an LSTM of two layers took twice its time in float. ``Cast``, ``Neg`` and a
``Mul`` by the negative scale give the same products.

``Cast`` and ``Mul`` alone would too, but OpenVINO (2026.4) knows them for compressed weights, and rounds to 8 bits what
it multiplies by those: a plain recurrent layer of 64 units kept 41 dB. Behind ``Neg`` it computes them as it opens the
file.

Left out on purpose: 4-bit weights of layers between quantizers, since the runtime would round floats there by itself.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant, zeros_of


def apply(model: ir.Model, units: Collection[str]) -> int:
    """Rewrites in place each dequantized constant of the named units, lookups aside; returns how many."""
    rounds = any(node.op_type == "QuantizeLinear" for node in model.graph)
    kinds = (ir.DataType.INT8,) if rounds else (ir.DataType.INT8, ir.DataType.INT4)
    found = [node for node in model.graph if node.meta.get("unit") in units and _is_stored(node, kinds)]
    for node in found:
        _rewrite(model, node)
    drop_unused(model)
    return len(found)


def _is_stored(node: ir.Node, kinds: Collection[ir.DataType]) -> bool:
    """Whether a node dequantizes a constant of these types by rows, without zero points, for other than lookups."""
    value = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    if value is None or not value.is_initializer() or value.dtype not in kinds:
        return False
    zeros = zeros_of(node)
    if any(reader.op_type == "Gather" for reader in node.outputs[0].consumers()):
        return False
    return node.attributes.get_int("axis", 1) == 0 and zeros is not None and not zeros.any()


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    integers, scales = node.inputs[:2]
    assert integers is not None
    assert scales is not None
    assert scales.const_value is not None
    assert integers.shape is not None
    column = scales.const_value.numpy().reshape(-1, *[1] * (len(integers.shape) - 1))
    factors = constant(model, f"{node.outputs[0].name}/scale", np.ascontiguousarray(-column))
    real = ir.node("Cast", [integers], {"to": ir.DataType.FLOAT}, name=f"{node.name}/cast")
    negative = ir.node("Neg", [real.outputs[0]], name=f"{node.name}/neg")
    for made in (real, negative):
        made.outputs[0].name = f"{node.outputs[0].name}/{made.op_type.lower()}"
    product = ir.node("Mul", [negative.outputs[0], factors], name=f"{node.name}/mul")
    model.graph.insert_before(node, [real, negative, product])
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], [product], node.outputs, product.outputs)
