"""Removes a Relu or Clip that the quantizer behind it performs anyway.

``q(x) = clamp(round(x/s) + z, qmin, qmax)`` already clips to ``[(qmin − z)·s, (qmax − z)·s]``. A Relu is
redundant when ``z = qmin``: everything below zero becomes ``qmin``. A Clip to ``[a, b]`` is redundant when
its ends quantize to the ends: ``round(a/s) + z ≤ qmin`` and ``round(b/s) + z ≥ qmax``. Left in place, it keeps
some runtimes from fusing the convolution before it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def apply(model: ir.Model) -> int:
    """Removes redundant activations in place; returns how many."""
    removed = 0
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
            producer = node.inputs[0].producer()
            if producer is not None and _is_redundant(producer, node):
                node.replace_input_with(0, producer.inputs[0])
                model.graph.remove(producer, safe=True)
                removed += 1
    return removed


def _is_redundant(activation: ir.Node, quantizer: ir.Node) -> bool:
    if activation.op_type not in ("Relu", "Clip") or len(activation.outputs[0].uses()) != 1:
        return False
    if activation.outputs[0].is_graph_output():
        return False
    bounds = _bounds(activation)
    return bounds is not None and clips_within(quantizer, *bounds)


def clips_within(quantizer: ir.Node, least: float, most: float) -> bool:
    """Whether a per-tensor quantizer clips to ``least``…``most`` or less."""
    found = qparams(quantizer)
    if found is None:
        return False
    bounds, (scale, zero_point, qmin, qmax) = (least, most), found
    low, high = (float(np.rint(np.float32(b) / np.float32(scale))) + zero_point for b in bounds)
    return low <= qmin and high >= qmax


def _bounds(activation: ir.Node) -> tuple[float, float] | None:
    if activation.op_type == "Relu":
        return 0.0, float("inf")
    bounds = [float("-inf"), float("inf")]
    for index in (1, 2):
        if index < len(activation.inputs) and (value := activation.inputs[index]) is not None:
            if value.const_value is None:
                return None
            bounds[index - 1] = float(value.const_value.numpy())
    return bounds[0], bounds[1]


def qparams(quantizer: ir.Node) -> tuple[float, int, int, int] | None:
    """Scale, zero point and limits of a quantizer or dequantizer; None when it is not constant per-tensor."""
    constants = [value.const_value if value is not None else None for value in quantizer.inputs[1:3]]
    if len(constants) < 2 or constants[0] is None or constants[1] is None:
        return None
    scale, zero_point = constants[0].numpy(), constants[1].numpy()
    if scale.size != 1:
        return None
    limits = np.iinfo(zero_point.dtype)
    return float(scale.reshape(())), int(zero_point.reshape(())), int(limits.min), int(limits.max)
