"""Has a pooling take the positions that pointwise convolutions with a stride read.

OpenVINO moves the stride of a 1×1 convolution before what gives its input, where no other operator reads that: between
the input's integers and their zero point, if it can go no further. It does not know a dequantizer with a pooling in its
middle, and runs the convolution in float. Written by itself, as a pooling of windows of one, the stride is where
OpenVINO would put it, on integers.
"""

from __future__ import annotations

import onnx_ir as ir


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions lost their stride."""
    changed = 0
    for node in list(model.graph):
        readers = _readers(node)
        if readers:
            take_strides(model, node.outputs[0], readers)
            changed += len(readers)
    return changed


def _readers(source: ir.Node) -> list[ir.Node]:
    """The pointwise convolutions that alone read a dequantizer, if they have strides and the same."""
    readers = list(source.outputs[0].consumers())
    if source.op_type != "DequantizeLinear" or not readers:
        return []
    found = {tuple(strides_of(reader)) for reader in readers}
    same = len(found) == 1 and max(found.pop(), default=1) > 1
    unpadded = (
        is_pointwise(reader)
        and reader.inputs[0] is source.outputs[0]
        and not any(reader.attributes.get_ints("pads", []))
        for reader in readers
    )
    return readers if same and all(unpadded) else []


def strides_of(conv: ir.Node) -> list[int]:
    """The strides of a convolution, as far as it names them."""
    return list(conv.attributes.get_ints("strides", []))


def is_pointwise(node: ir.Node) -> bool:
    """Whether a node is a convolution of windows of one, its padding in numbers."""
    attributes = node.attributes
    return (
        node.op_type == "Conv"
        and set(attributes.get_ints("kernel_shape", [0])) == {1}
        and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    )


def take_strides(model: ir.Model, value: ir.Value, readers: list[ir.Node]) -> None:
    """Has one pooling of a computed ``value`` take the positions that convolutions with the same strides read of it."""
    source, strides = value.producer(), strides_of(readers[0])
    windows = [ir.AttrInt64s("kernel_shape", [1] * len(strides)), ir.AttrInt64s("strides", strides)]
    assert source is not None
    name = f"{source.name or value.name}/every/{readers[0].name or readers[0].outputs[0].name}"
    pool = ir.Node("", "MaxPool", [value], windows, name=name)
    made = pool.outputs[0]
    made.name, made.dtype = name, value.dtype
    model.graph.insert_after(source, pool)
    for reader in readers:
        reader.replace_input_with(0, made)
        reader.attributes["strides"] = ir.AttrInt64s("strides", [1] * len(strides))
