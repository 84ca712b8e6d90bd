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
        strides = _strides(node)
        if strides is not None:
            changed += _pool(model, node, strides)
    return changed


def _strides(source: ir.Node) -> list[int] | None:
    """The strides of the pointwise convolutions that alone read a dequantizer, if they have some and the same."""
    readers = source.outputs[0].consumers()
    if source.op_type != "DequantizeLinear" or not readers:
        return None
    found = {tuple(reader.attributes.get_ints("strides", [])) for reader in readers}
    same = len(found) == 1 and max(next(iter(found)), default=1) > 1
    return list(found.pop()) if same and all(_is_pointwise(reader, source) for reader in readers) else None


def _is_pointwise(node: ir.Node, source: ir.Node) -> bool:
    attributes = node.attributes
    return (
        node.op_type == "Conv" and node.inputs[0] is source.outputs[0]
        and set(attributes.get_ints("kernel_shape", [0])) == {1} and not any(attributes.get_ints("pads", []))
        and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    )  # fmt: skip


def _pool(model: ir.Model, source: ir.Node, strides: list[int]) -> int:
    value, readers = source.outputs[0], list(source.outputs[0].consumers())
    windows = [ir.AttrInt64s("kernel_shape", [1] * len(strides)), ir.AttrInt64s("strides", strides)]
    pool = ir.Node("", "MaxPool", [value], windows, name=f"{source.name or value.name}/every")
    made = pool.outputs[0]
    made.name, made.dtype = pool.name, value.dtype
    model.graph.insert_after(source, pool)
    for reader in readers:
        reader.replace_input_with(0, made)
        reader.attributes["strides"] = ir.AttrInt64s("strides", [1] * len(strides))
    return len(readers)
