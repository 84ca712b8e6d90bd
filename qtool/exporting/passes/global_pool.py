"""Writes a mean over all spatial axes as GlobalAveragePool, for which runtimes have an integer kernel.

torch exports ``AdaptiveAvgPool2d(1)`` and ``x.mean((2, 3))`` as ReduceMean. Only a mean between a dequantize
and a quantize is rewritten; without kept dimensions a Reshape of the integers follows, which moves no data.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import between_integers, constant


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many means became poolings."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "ReduceMean" and _is_spatial(node) and between_integers(node):
            _rewrite(model, node)
            changed += 1
    return changed


def _is_spatial(node: ir.Node) -> bool:
    source = node.inputs[0]
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if source is None or source.shape is None or axes is None or axes.const_value is None:
        return False
    rank = len(source.shape)
    return rank > 2 and sorted(int(a) % rank for a in axes.const_value.numpy().ravel()) == list(range(2, rank))


def _rewrite(model: ir.Model, node: ir.Node) -> None:
    attribute = node.attributes.get("keepdims")
    keep = attribute is None or attribute.as_int() == 1
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    assert source.shape is not None
    pool = ir.node("GlobalAveragePool", [source], name=node.name)
    pooled = pool.outputs[0]
    pooled.name, pooled.dtype = result.name, source.dtype
    pooled.shape = ir.Shape([*list(source.shape)[:2], *[1] * (len(source.shape) - 2)])
    model.graph.insert_before(node, pool)
    for quantizer in result.consumers():
        quantizer.replace_input_with(0, pooled)
        if not keep:
            _drop_axes(model, quantizer, result.shape)
        quantizer.outputs[0].shape = pooled.shape
    model.graph.remove(node, safe=True)


def _drop_axes(model: ir.Model, quantizer: ir.Node, shape: ir.Shape | None) -> None:
    """Drops the unit axes of the pooled cells once they are integers."""
    quantized = quantizer.outputs[0]
    sizes = constant(model, f"{quantized.name}/shape", np.array([0, -1], dtype=np.int64))
    readers = list(quantized.uses())
    reshape = ir.node("Reshape", [quantized, sizes], name=f"{quantized.name}/reshape")
    flat = reshape.outputs[0]
    flat.name, flat.dtype, flat.shape = f"{quantized.name}/flat", quantized.dtype, shape
    for use in readers:
        use.node.replace_input_with(use.idx, flat)
    model.graph.insert_after(quantizer, reshape)
