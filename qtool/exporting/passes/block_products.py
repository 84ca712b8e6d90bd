"""Linear layers whose weights alone are integers, in the form that ONNX Runtime multiplies without dequantizing them.

Its kernel for such weights (MatMulNBits) reads them as inputs × outputs, in 4 or 8 bits, and rounds each row of inputs
to 8 bits as it comes (:mod:`qtool.exporting.block_products`). The exporter writes outputs × inputs and a Gemm that
turns them, which the runtime does not recognise: it dequantizes the whole weight in every run, slower than FP32 several
times over. So they are stored turned. Where a lookup reads the same integers, a Transpose turns them instead, which the
runtime does once. It recognises no weight or scales that something else reads: those are stored twice, and so are
those that are equal by chance, which the exporter stores once (the layers of an untrained ``nn.TransformerEncoder`` are
copies).

Where inputs share scales in groups, the graph has a row for each group and a reshape; the file has ONNX's own form, a
DequantizeLinear with ``block_size``.

A Relu or a Clip right behind the layer keeps the runtime from it as well: it is set apart (``clips_apart.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes import clips_apart
from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant, dequantized, dequantizer_of, layer_unit

DEQUANTIZE = "DequantizeLinear"


def apply(model: ir.Model, units: Collection[str]) -> int:
    """Rewrites in place each such layer of the named units; returns how many."""
    return _rewrite(model, units, turned=True)


def join_groups(model: ir.Model, units: Collection[str]) -> int:
    """The same for weights in groups alone, which OpenVINO knows in that form; others it reads as they stand."""
    return _rewrite(model, units, turned=False)


def _rewrite(model: ir.Model, units: Collection[str], *, turned: bool) -> int:
    layers = [node for node in model.graph if layer_unit(node) in units and _turns_its_weight(node)]
    changed = 0
    for weight in dict.fromkeys(node.inputs[1] for node in layers):
        assert weight is not None
        readers = [node for node in layers if node.inputs[1] is weight]
        source = dequantizer_of(readers[0])
        assert source is not None
        if source is not weight.producer():
            _join_groups(model, weight, source, readers)
        elif turned:
            _turn(model, weight, readers)
        else:
            continue
        if turned:
            _set_apart(model, readers)
        for layer in readers:
            layer.attributes["transB"] = ir.AttrInt64("transB", 0)
            clips_apart.set_apart(model, layer)
        changed += len(readers)
    drop_unused(model)
    return changed


def _turns_its_weight(node: ir.Node) -> bool:
    """Whether a layer reads stored integers as outputs × inputs."""
    turns = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    return turns and dequantizer_of(node) is not None


def _turn(model: ir.Model, weight: ir.Value, layers: list[ir.Node]) -> None:
    """Stores a weight turned for its layers, or turns its integers in the graph where something else reads them."""
    source = weight.producer()
    assert source is not None
    stored = source.inputs[0]
    assert stored is not None
    if set(weight.consumers()) == set(layers) and list(stored.consumers()) == [source]:
        _own(model, source, 1)
        assert stored.const_value is not None
        _store(stored, stored.const_value.numpy().T)
        source.attributes["axis"] = ir.AttrInt64("axis", 1)
        source.resize_inputs(2)
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


def _set_apart(model: ir.Model, layers: list[ir.Node]) -> None:
    """Gives each of several layers that read one weight a dequantizer of its own, and what is stored for it."""
    weight = layers[0].inputs[1]
    assert weight is not None
    source = weight.producer()
    assert source is not None
    for number, layer in enumerate(layers[1:], 2):
        again = dequantized(model, layer, 1, source.inputs, f"{weight.name}/{number}")
        for index, stored in enumerate(source.inputs):
            if stored is not None and stored.is_initializer():
                _own(model, again, index)


def _join_groups(model: ir.Model, weight: ir.Value, source: ir.Node, layers: list[ir.Node]) -> None:
    """Stores rows of groups as one matrix, inputs × outputs, with a scale for each block of inputs."""
    _own(model, source, 0)
    _own(model, source, 1)
    (rows, scale), reshape = source.inputs[:2], weight.producer()
    assert rows is not None
    assert rows.const_value is not None
    assert scale is not None
    assert scale.const_value is not None
    assert reshape is not None
    numbers, (outputs, inputs) = rows.const_value.numpy(), _sizes(reshape)
    _store(rows, numbers.reshape(outputs, inputs).T)
    _store(scale, scale.const_value.numpy().reshape(outputs, -1).T)
    for name, value in (("axis", 0), ("block_size", numbers.shape[1])):
        source.attributes[name] = ir.AttrInt64(name, value)
    source.resize_inputs(2)
    source.outputs[0].shape = rows.shape
    for layer in layers:
        layer.replace_input_with(1, source.outputs[0])
    model.graph.remove(reshape, safe=True)


def _own(model: ir.Model, source: ir.Node, index: int) -> None:
    """Gives a dequantizer a stored input of its own."""
    value = source.inputs[index]
    assert value is not None
    if list(value.consumers()) != [source]:
        assert value.const_value is not None
        name = f"{source.outputs[0].name}/{('rows', 'scale')[index]}"
        source.replace_input_with(index, constant(model, name, value.const_value.numpy()))


def _sizes(reshape: ir.Node) -> list[int]:
    shape = reshape.inputs[1]
    assert shape is not None
    assert shape.const_value is not None
    return [int(size) for size in shape.const_value.numpy()]


def _store(value: ir.Value, numbers: npt.NDArray[Any]) -> None:
    assert value.const_value is not None
    value.const_value = ir.Tensor(np.ascontiguousarray(numbers), dtype=value.dtype, name=value.name)
    value.shape = ir.Shape(numbers.shape)
