"""Weights of four bits are stored as such: two to a byte, behind the DequantizeLinear that they had.

The graph holds them as int8 between −7 and 7. ONNX knows ``INT4`` from opset 21 on. Of ONNX Runtime's CPU provider, a
linear layer over floats multiplies them as they are (``block_products.py``); a convolution dequantizes its weights and
runs in float, so that what is gained is size.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from qtool.errors import UsageError
from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import WEIGHTED
from qtool.exporting.passes.parts import dequantizer_of

LEAST_OPSET = 21


def apply(model: ir.Model, units: Collection[str], opset: int) -> int:
    """Packs the weights of the named units, in place; returns how many. Raises UsageError for an opset without INT4."""
    if units and opset < LEAST_OPSET:
        raise UsageError("--opset", f"{LEAST_OPSET} or more for 4-bit weights", str(opset), "leave --opset out")
    packed = 0
    for node in model.graph:
        unit = (node.name or "").partition("/")[0]  # a reshape before it may be the unit's first operator
        source = dequantizer_of(node) if node.op_type in WEIGHTED and unit in units else None
        if source is not None:
            _pack(source)
            packed += 1
    drop_unused(model)
    return packed


def _pack(dequantize: ir.Node) -> None:
    """Stores the weight in four bits, its zero points not at all: they are 0, and may be another layer's too.

    Equal weights are stored once: all that dequantizes this one finds four bits there.
    """
    value = dequantize.inputs[0]
    if value is None or value.const_value is None or value.dtype != ir.DataType.INT8:
        return
    numbers = value.const_value.numpy().astype(ir.DataType.INT4.numpy())
    value.const_value = ir.Tensor(numbers, dtype=ir.DataType.INT4, name=value.name)
    value.dtype = ir.DataType.INT4
    for reader in value.consumers():
        reader.resize_inputs(2)
