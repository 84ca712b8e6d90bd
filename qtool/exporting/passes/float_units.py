"""Keeps a layer or a softmax that the plan left in float from being quantized by the runtime.

ONNX Runtime quantizes by itself the float weight of a Conv, ConvTranspose or Gemm that stands between a
DequantizeLinear and a QuantizeLinear (also through a Relu or Clip): to int8, one scale for the whole tensor. A
layer that was left in float because careful eight bits hurt it would lose more. The rule looks for exactly that
pattern, so ``LeakyRelu`` with slope 1, which is the identity, is put behind the layer; the runtime runs it as the
activation inside the float kernel.

A softmax there becomes a table of exponentials whose sums in 32 bits overflow before version 1.32 where the output's
step is far below 1/256, as between the convolutions over heads of EfficientFormerV2: every result is wrong. The same
identity keeps it.
"""

from __future__ import annotations

import onnx_ir as ir

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "Softmax"})


def apply(model: ir.Model) -> int:
    """Puts the identity behind every such layer, in place; returns how many."""
    guarded = [node for node in model.graph if node.op_type in LAYERS and _would_be_quantized(node)]
    for node in guarded:
        _guard(model, node)
    return len(guarded)


def _would_be_quantized(node: ir.Node) -> bool:
    source, weight = (value.producer() if value is not None else None for value in (*node.inputs, None)[:2])
    if source is None or source.op_type != "DequantizeLinear" or weight is not None:
        return False
    readers = [use.node for use in node.outputs[0].uses()]
    while readers and all(reader.op_type in ("Relu", "Clip") for reader in readers):
        readers = [use.node for reader in readers for use in reader.outputs[0].uses()]
    return any(reader.op_type == "QuantizeLinear" for reader in readers)


def _guard(model: ir.Model, node: ir.Node) -> None:
    result = node.outputs[0]
    identity = ir.node("LeakyRelu", [result], attributes={"alpha": 1.0}, name=f"{node.name}/float")
    kept = identity.outputs[0]
    kept.name, kept.shape, kept.dtype = f"{result.name}/float", result.shape, result.dtype
    for use in list(result.uses()):
        if use.node is not identity:
            use.node.replace_input_with(use.idx, kept)
    model.graph.insert_after(node, identity)
