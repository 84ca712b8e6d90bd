"""Writes a hard sigmoid between integers as a sum, for which runtimes have an integer kernel.

``hardsigmoid(x) = clamp(x/6 + 1/2, 0, 1)``. With ``x = s·(q − z)``, ``x/6`` is these integers under the scale ``s/6``,
so only the sum with a half is left; the clamp is the output quantizer's, whose ends have to lie within [0, 1]. The half
is stored as the integer 1 under the scale 1/2.

The function has 256 values. Where one lies so near the edge between two integers that float32 decides, the sum may
round it to the other side, and a feature map may hold that value often; so the scale is moved by a few units in its
last place until all 256 results are those of the original.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from qtool.exporting.passes.activations import clips_within, qparams
from qtool.exporting.passes.parts import constant
from qtool.exporting.reference.integer_arithmetic import Affine, Quantized, dequantize, quantize, saturate
from qtool.exporting.reference.integer_kernels import every_integer, weighted_sum

SLOPE, MIDDLE = np.float32(1 / 6), np.float32(0.5)
MOST_ULPS = 16


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many hard sigmoids became sums."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "HardSigmoid" and (source := _dequantizer(node)) is not None and _is_clipped(node):
            _rewrite(model, node, source)
            changed += 1
    return changed


def _dequantizer(node: ir.Node) -> ir.Node | None:
    """The per-tensor dequantizer that a hard sigmoid as torch defines it reads; None where there is none."""
    if np.float32(node.attributes.get_float("alpha", 0.2)) != SLOPE or node.attributes.get_float("beta", 0.5) != 0.5:
        return None
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return source if source is not None and source.op_type == "DequantizeLinear" and qparams(source) else None


def _is_clipped(node: ir.Node) -> bool:
    """Whether only quantizers read the node, and each clips to [0, 1] itself."""
    users = node.outputs[0].consumers()
    if not users or node.outputs[0].is_graph_output():
        return False
    return all(user.op_type == "QuantizeLinear" and clips_within(user, 0.0, 1.0) for user in users)


def _rewrite(model: ir.Model, node: ir.Node, source: ir.Node) -> None:
    zero = source.inputs[2]
    assert zero is not None
    assert zero.const_value is not None
    kind = zero.const_value.numpy().dtype
    name = node.name or node.outputs[0].name
    scaled = _dequantize(
        model, f"{name}/scaled", source.inputs[0], _scale(source, node.outputs[0].consumers()[0]), zero
    )
    # Of as many axes as what it is added to: before trailing axes of 1 a shorter one is added element by element
    rank = len(node.outputs[0].shape or (1,))
    one = constant(model, f"{name}/one", np.ones((1,) * rank, kind))
    offset = _dequantize(model, f"{name}/offset", one, MIDDLE, constant(model, f"{name}/zero", np.zeros((), kind)))
    total = ir.node("Add", [scaled.outputs[0], offset.outputs[0]], name=node.name)
    result = node.outputs[0]
    scaled.outputs[0].shape = total.outputs[0].shape = result.shape
    total.outputs[0].name, total.outputs[0].dtype = f"{result.name}/sum", result.dtype
    model.graph.insert_before(node, [scaled, offset, total])
    for user in result.consumers():
        user.replace_input_with(0, total.outputs[0])
    model.graph.remove(node, safe=True)
    if not source.outputs[0].consumers() and not source.outputs[0].is_graph_output():
        model.graph.remove(source, safe=True)


def _scale(source: ir.Node, quantizer: ir.Node) -> np.float32:
    """A sixth of the input's scale, moved so little that the sum gives all integers as the hard sigmoid does."""
    x, output = _affine(source), _affine(quantizer)
    integers = every_integer(Quantized(torch.zeros(1, dtype=x.dtype), x))
    wanted = quantize(torch.nn.functional.hardsigmoid(dequantize(Quantized(integers, x))), output).values
    one = Quantized(torch.ones(1, dtype=x.dtype), Affine.of(float(MIDDLE), 0, x.dtype))
    sixth = up = down = np.float32(x.scale.item()) * SLOPE
    candidates = [sixth]
    for _ in range(MOST_ULPS):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(0))
        candidates += [up, down]
    for scale in candidates:
        scaled = Quantized(integers, Affine.of(float(scale), x.zero_point, x.dtype))
        if torch.equal(saturate(weighted_sum(scaled, one, output), output).values, wanted):
            return np.float32(scale)
    return np.float32(sixth)


def _affine(node: ir.Node) -> Affine:
    found = qparams(node)
    assert found is not None
    return Affine.of(found[0], found[1], torch.uint8 if found[2] == 0 else torch.int8)


def _dequantize(model: ir.Model, name: str, integers: ir.Value | None, scale: np.float32, zero: ir.Value) -> ir.Node:
    node = ir.node("DequantizeLinear", [integers, constant(model, f"{name}/scale", np.array(scale)), zero], name=name)
    node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
    return node
