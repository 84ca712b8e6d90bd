"""Linear layers whose weights alone are integers, in the form that ONNX Runtime multiplies without dequantizing them.

Its kernel for such weights (MatMulNBits) reads them as inputs × outputs, in 4 or 8 bits, and rounds each row of inputs
to 8 bits as it comes (:mod:`qtool.exporting.block_products`). The exporter writes outputs × inputs and a Gemm that
turns them, which the runtime does not recognise: it dequantizes the whole weight in every run, slower than FP32 several
times over. So they are stored turned. Where a lookup reads the same integers, a Transpose turns them instead, which the
runtime does once, and the scales are stored twice: it recognises none that something else reads.

A layer of 8 bits that reads a DequantizeLinear is integer, and stays. One of 4 bits is not, and reads it behind an
identity (``float_units.py``): the runtime would take the pair for its own and run neither in integers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.float_units import keep_in_float
from qtool.exporting.passes.parts import constant, zeros_of

DEQUANTIZE = "DequantizeLinear"
MOVES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Identity")


def apply(model: ir.Model) -> int:
    """Rewrites in place each such layer; returns how many."""
    layers = [node for node in model.graph if _turns_its_weight(node)]
    fed = [node for node in layers if _reads_integers(node)]
    for value in dict.fromkeys(node.inputs[0] for node in fed):
        assert value is not None
        keep_in_float(model, value, [node for node in fed if node.inputs[0] is value])
    for weight in dict.fromkeys(node.inputs[1] for node in layers):
        assert weight is not None
        _turn(model, weight, [node for node in layers if node.inputs[1] is weight])
    drop_unused(model)
    return len(layers)


def _turns_its_weight(node: ir.Node) -> bool:
    """Whether a Gemm of floats turns integers that one scale for each output dequantizes, along the first axis."""
    if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
        return False
    weight = node.inputs[1].producer() if node.inputs[1] is not None else None
    if weight is None or weight.op_type != DEQUANTIZE:
        return False
    stored, zeros = weight.inputs[0], zeros_of(weight)
    if stored is None or stored.const_value is None or zeros is None or zeros.any():
        return False
    is_integer = _reads_integers(node) and stored.dtype != ir.DataType.INT4
    return not is_integer and weight.attributes.get_int("axis", 1) == 0


def _reads_integers(node: ir.Node) -> bool:
    """Whether what a layer reads comes from a DequantizeLinear, behind a reshape or not."""
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    while source is not None and source.op_type in MOVES and source.inputs[0] is not None:
        source = source.inputs[0].producer()
    return source is not None and source.op_type == DEQUANTIZE


def _turn(model: ir.Model, weight: ir.Value, layers: list[ir.Node]) -> None:
    """Stores a weight turned for its layers, or turns its integers in the graph where something else reads them."""
    source = weight.producer()
    assert source is not None
    stored = source.inputs[0]
    assert stored is not None
    if set(weight.consumers()) == set(layers) and list(stored.consumers()) == [source]:
        _store_turned(stored)
        source.attributes["axis"] = ir.AttrInt64("axis", 1)
        weight.shape = stored.shape
    else:
        assert source.inputs[1] is not None
        assert source.inputs[1].const_value is not None
        scale = constant(model, f"{weight.name}/scale", source.inputs[1].const_value.numpy())
        turned = ir.node("Transpose", [stored], {"perm": [1, 0]}, name=f"{weight.name}/turned")
        real = ir.node(DEQUANTIZE, [turned.outputs[0], scale], {"axis": 1}, name=f"{weight.name}/real")
        for node, dtype in ((turned, stored.dtype), (real, weight.dtype)):
            node.outputs[0].name, node.outputs[0].dtype = node.name, dtype
        model.graph.insert_before(layers[0], [turned, real])
        for layer in layers:
            layer.replace_input_with(1, real.outputs[0])
        if not weight.consumers():
            model.graph.remove(source, safe=True)
    for layer in layers:
        layer.attributes["transB"] = ir.AttrInt64("transB", 0)


def _store_turned(stored: ir.Value) -> None:
    assert stored.const_value is not None
    numbers = np.ascontiguousarray(stored.const_value.numpy().T)
    stored.const_value = ir.Tensor(numbers, dtype=stored.dtype, name=stored.name)
    stored.shape = ir.Shape(numbers.shape)
