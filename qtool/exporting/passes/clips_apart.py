"""Sets a Relu or a Clip in float apart from the integer layer before it, which gives float.

ONNX Runtime takes one that alone reads a layer's results for a part of the quantizer behind it, unless it ends the
graph. Where there is none, or one that clips less, as behind ``clamp(0.1, 5)``, whose range excludes 0, it runs the
whole layer in float. So it acts on a view with an axis more, which costs nothing.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import constant, dequantizer_of

CLIPS = ("Relu", "Clip")


def apply(model: ir.Model) -> int:
    """Rewrites in place, once no Clip is left that a quantizer performs; returns behind how many layers."""
    layers = [node for node in model.graph if _is_integer_product(node) and _is_followed(node)]
    for layer in layers:
        set_apart(model, layer)
    return len(layers)


def _is_integer_product(node: ir.Node) -> bool:
    source = node.inputs[0].producer() if node.op_type in ("Gemm", "MatMul") and node.inputs[0] is not None else None
    return source is not None and source.op_type == "DequantizeLinear" and dequantizer_of(node) is not None


def _is_followed(node: ir.Node) -> bool:
    """Whether nothing but a Clip reads a layer's results, and that it does not end the graph."""
    readers = node.outputs[0].consumers()
    return [reader.op_type in CLIPS for reader in readers] == [True] and not readers[0].outputs[0].is_graph_output()


def set_apart(model: ir.Model, layer: ir.Node) -> None:
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
