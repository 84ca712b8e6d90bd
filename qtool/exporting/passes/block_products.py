"""Linear layers whose weights alone are integers, in the form that ONNX Runtime multiplies without dequantizing them.

Its kernel for such weights (MatMulNBits) reads them as inputs × outputs, in 4 or 8 bits, and rounds each row of inputs
to 8 bits as it comes (:mod:`qtool.exporting.block_products`). The exporter writes outputs × inputs and a Gemm that
turns them, which the runtime does not recognise: it dequantizes the whole weight in every run, slower than FP32 several
times over. So they are stored turned. Where a lookup reads the same integers, a Transpose turns them instead, which the
runtime does once, and the scales are stored twice: it recognises none that something else reads.

Where inputs share scales in groups, the graph has a row for each group and a reshape; the file has ONNX's own form, a
DequantizeLinear with ``block_size``.

A Relu or a Clip right behind the layer keeps the runtime from it as well: it acts on a view with an axis more.

What reads a DequantizeLinear is integer, and stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant, dequantizer_of, zeros_of

DEQUANTIZE = "DequantizeLinear"
CLIPS = ("Relu", "Clip")
MOVES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Identity")


def apply(model: ir.Model) -> int:
    """Rewrites in place each such layer; returns how many."""
    return _rewrite(model, [node for node in model.graph if _turns_its_weight(node)])


def join_groups(model: ir.Model) -> int:
    """The same for weights in groups alone, which OpenVINO knows in that form; others it reads as they stand."""
    layers = [node for node in model.graph if _turns_its_weight(node)]
    return _rewrite(model, [node for node in layers if _producer(node.inputs[1]) is not dequantizer_of(node)])


def _producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None else None


def _rewrite(model: ir.Model, layers: list[ir.Node]) -> int:
    for weight in dict.fromkeys(node.inputs[1] for node in layers):
        assert weight is not None
        readers = [node for node in layers if node.inputs[1] is weight]
        source = dequantizer_of(readers[0])
        assert source is not None
        if source is weight.producer():
            _turn(model, weight, readers)
        else:
            _join_groups(model, weight, source, readers)
        for layer in readers:
            layer.attributes["transB"] = ir.AttrInt64("transB", 0)
            _set_apart(model, layer)
    drop_unused(model)
    return len(layers)


def _turns_its_weight(node: ir.Node) -> bool:
    """Whether a Gemm of floats turns integers that one scale for each output dequantizes, along the first axis."""
    if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
        return False
    weight = dequantizer_of(node)
    if weight is None or weight.inputs[0] is None:
        return False
    zeros = zeros_of(weight)
    if zeros is None or zeros.any() or _reads_integers(node):
        return False
    return bool(weight.attributes.get_int("axis", 1) == 0)


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


def _set_apart(model: ir.Model, layer: ir.Node) -> None:
    """Puts views around what clips a layer's results."""
    for clip in [node for node in layer.outputs[0].consumers() if node.op_type in CLIPS]:
        axis = constant(model, f"{clip.outputs[0].name}/axis", np.array([0]))
        view, result = ir.node("Unsqueeze", [clip.inputs[0], axis], name=f"{clip.name}/view"), clip.outputs[0]
        view.outputs[0].name, view.outputs[0].dtype = f"{result.name}/view", result.dtype
        clip.replace_input_with(0, view.outputs[0])
        back = ir.node("Squeeze", [result, axis], name=f"{clip.name}/back")
        model.graph.insert_before(clip, view)
        model.graph.insert_after(clip, back)
        made, back.outputs[0].dtype = back.outputs[0], result.dtype
        ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
        back.replace_input_with(0, result)
        made.name, made.shape, result.name, result.shape = result.name, result.shape, f"{result.name}/clipped", None


def _join_groups(model: ir.Model, weight: ir.Value, source: ir.Node, layers: list[ir.Node]) -> None:
    """Stores rows of groups as one matrix, inputs × outputs, with a scale for each block of inputs."""
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


def _sizes(reshape: ir.Node) -> list[int]:
    shape = reshape.inputs[1]
    assert shape is not None
    assert shape.const_value is not None
    return [int(size) for size in shape.const_value.numpy()]


def _store(value: ir.Value, numbers: npt.NDArray[Any]) -> None:
    assert value.const_value is not None
    value.const_value = ir.Tensor(np.ascontiguousarray(numbers), dtype=value.dtype, name=value.name)
    value.shape = ir.Shape(numbers.shape)
