"""Weights of four bits are stored as such: two to a byte, behind the DequantizeLinear that they had.

The graph holds them as int8 between −8 and 7. ONNX knows ``INT4`` from opset 21 on. Of ONNX Runtime's CPU provider, a
linear layer over floats multiplies them as they are (``block_products.py``). Its integer kernels know bytes only, and a
layer between integers would dequantize its weights in every run and compute in float, at two thirds of FP32's speed. So
there a ``Cast`` makes int8 of them, which the runtime does once, as the file is opened: the file is half as large, and
the kernels are those of eight bits.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import dequantizer_of, layer_unit


def apply(model: ir.Model, units: Collection[str], *, widened: bool = False) -> int:
    """Packs the weights of the named units, in place, ``widened`` to bytes for who reads them; returns how many."""
    sources = [
        source for node in model.graph if layer_unit(node) in units and (source := dequantizer_of(node)) is not None
    ]
    for source in dict.fromkeys(sources):
        _pack(source)
    for stored in dict.fromkeys(source.inputs[0] for source in sources):
        assert stored is not None
        if widened:
            _widen(model, stored)
        else:
            _drop_zero_points(stored)
    drop_unused(model)
    return len(sources)


def _widen(model: ir.Model, stored: ir.Value) -> None:
    """Puts the Cast between packed integers and what reads them."""
    readers = list(stored.uses())
    cast = ir.node("Cast", [stored], {"to": ir.DataType.INT8}, name=f"{stored.name}/bytes")
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = cast.name, ir.DataType.INT8, stored.shape
    model.graph.insert_before(next(node for node in model.graph if any(use.node is node for use in readers)), cast)
    for use in readers:
        use.node.replace_input_with(use.idx, wide)


def _pack(dequantize: ir.Node) -> None:
    """Stores the weight in four bits. Equal weights are stored once: all that dequantizes this one finds these."""
    value = dequantize.inputs[0]
    if value is None or value.const_value is None or value.dtype != ir.DataType.INT8:
        return
    numbers = value.const_value.numpy().astype(ir.DataType.INT4.numpy())
    value.const_value = ir.Tensor(numbers, dtype=ir.DataType.INT4, name=value.name)
    value.dtype = ir.DataType.INT4


def _drop_zero_points(stored: ir.Value) -> None:
    """Leaves out zero points of a packed weight, which are 0 and of another type; they may be another layer's too."""
    for reader in stored.consumers():
        reader.resize_inputs(2)
