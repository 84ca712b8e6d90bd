"""Stores once what the exporter computed beforehand several times.

A stored tensor that many operators read in another form (the weights of a cell that is written step by step, each step
with the weight turned) is folded for each of them, and only small results are compared: an RNN of ten steps held its
weight ten times, and so did the FP32 file that sizes are compared with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import onnx_ir as ir


def apply(model: ir.Model, own: Collection[str]) -> int:
    """Rewrites in place; returns how many tensors went. Those named in ``own``, the model's, stay."""
    first: dict[object, ir.Value] = {}
    merged = 0
    for name, value in list(model.graph.initializers.items()):
        if name in own or value.const_value is None or value.is_graph_output():
            continue
        numbers = value.const_value
        same = first.setdefault((numbers.dtype, tuple(numbers.shape), _digest(numbers)), value)
        if same is not value:
            ir.convenience.replace_all_uses_with(value, same)
            del model.graph.initializers[name]
            merged += 1
    return merged


def _digest(numbers: ir.TensorProtocol) -> bytes:
    return hashlib.sha256(numbers.tobytes()).digest()
