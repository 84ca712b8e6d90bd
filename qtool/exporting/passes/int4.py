"""Weights of four bits are stored as such: two to a byte, behind the DequantizeLinear that they had.

The graph holds them as int8 between −7 and 7. ONNX knows ``INT4`` from opset 21 on. No kernel of ONNX Runtime's CPU
provider multiplies them: a convolution or linear layer dequantizes its weights and runs in float, so that what is
gained is size.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from qtool.errors import UsageError

LEAST_OPSET = 21


def apply(model: ir.Model, units: Collection[str], opset: int) -> int:
    """Packs the weights of the named units, in place; returns how many. Raises UsageError for an opset without INT4."""
    if units and opset < LEAST_OPSET:
        raise UsageError("--opset", f"{LEAST_OPSET} or more for 4-bit weights", str(opset), "leave --opset out")
    packed = 0
    for node in model.graph:
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        source = weight.producer() if weight is not None and node.name in units else None
        if source is not None and source.op_type == "DequantizeLinear":
            for index in (0, 2):
                value = source.inputs[index] if index < len(source.inputs) else None
                if value is not None and value.const_value is not None:
                    _pack(value)
            packed += 1
    return packed


def _pack(value: ir.Value) -> None:
    assert value.const_value is not None
    numbers = value.const_value.numpy()
    if numbers.dtype == np.int8:
        value.const_value = ir.Tensor(numbers.astype(ir.DataType.INT4.numpy()), dtype=ir.DataType.INT4, name=value.name)
        value.dtype = ir.DataType.INT4
