"""Keeps a layer, a softmax or a pool that the plan left in float from being quantized by the runtime.

ONNX Runtime quantizes by itself the float weight of a Conv, ConvTranspose or Gemm that stands between a
DequantizeLinear and a QuantizeLinear (also through a Relu or Clip): to int8, one scale for the whole tensor. A
layer that was left in float because careful eight bits hurt it would lose more. The rule looks for exactly that
pattern, so ``LeakyRelu`` with slope 1, which is the identity, is put behind the layer; the runtime runs it as the
activation inside the float kernel.

A softmax there becomes a table of exponentials whose sums in 32 bits overflow before version 1.32 where the output's
step is far below 1/256, as between the convolutions over heads of EfficientFormerV2: every result is wrong. The same
identity keeps it, and an average over windows that are not alike, whose integer kernel is slow (see
:mod:`qtool.quantization.targets.ort_cpu`).

A maximum over windows of floats gives the same integers before its quantizer as behind it, and the runtime moves the
quantizer in front. What comes from float lies in planes, though, for which it has a quick kernel for floats alone:
64 planes of 113×113 take 0.15 ms so, and 6 ms in bytes (3×3, AVX512-VNNI, one thread). The identity keeps the order.
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.mean_pools import has_equal_windows
from qtool.exporting.passes.names import DEQUANTIZE, QUANTIZE
from qtool.exporting.passes.parts import is_read
from qtool.exporting.reference.integer_graph import PROPAGATED

_KINDS = ("Conv", "ConvTranspose", "Gemm", "Softmax", "MaxPool")
_CLIPS = ("Relu", "Clip")
_MOVED_PAST = PROPAGATED - {"MaxPool"}
"""Past what the runtime moves a quantizer until it is behind a maximum; of maxima in a row the last is kept."""


def apply(model: ir.Model) -> int:
    """Puts the identity behind every such operator, in place; returns how many."""
    guarded = [node for node in model.graph if _is_in_float(node) and _would_be_quantized(node)]
    for node in guarded:
        _guard(model, node)
    return len(guarded)


def _is_in_float(node: ir.Node) -> bool:
    flat = node.op_type == "AveragePool" and len(node.attributes.get_ints("kernel_shape", [])) < 3
    return node.op_type in _KINDS or (flat and not has_equal_windows(node))


def _would_be_quantized(node: ir.Node) -> bool:
    source, weight = (value.producer() if value is not None else None for value in (*node.inputs, None)[:2])
    dequantized = source is not None and source.op_type == DEQUANTIZE
    if node.op_type == "MaxPool":
        return not dequantized and is_read(node, (QUANTIZE,), _MOVED_PAST)
    return dequantized and weight is None and is_read(node, (QUANTIZE,), _CLIPS)


def _guard(model: ir.Model, node: ir.Node) -> None:
    result = node.outputs[0]
    identity = ir.node("LeakyRelu", [result], attributes={"alpha": 1.0}, name=f"{node.name}/float")
    kept = identity.outputs[0]
    kept.name, kept.shape, kept.dtype = f"{result.name}/float", result.shape, result.dtype
    for use in list(result.uses()):
        if use.node is not identity:
            use.node.replace_input_with(use.idx, kept)
    model.graph.insert_after(node, identity)
