"""Dequantizes in front of a norm, whose epsilon is for real numbers.

OpenVINO (2026.4) takes a scale s through sums and norms, as if a norm of numbers s times as large were the same:

    norm(s · x, ε) = norm(x, ε / s²)

Where the variance is not far above ε that is another answer (a stream of 0.02 behind a parallel block of a Falcon,
arXiv 2311.16867: 37 dB). It takes none past a Max, and the greater of a number and the least of all is the number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import MOVES, constant

_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")
_THROUGH = ("Add", "Sub", *MOVES)


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many dequantized values are kept in front of norms."""
    reads = dict.fromkeys(read for node in model.graph if node.op_type in _NORMS for read in _reads(node, set()))
    kept: dict[ir.Value, ir.Value] = {}
    for node, index in reads:
        value = node.inputs[index]
        assert value is not None
        if value not in kept:
            kept[value] = _keep(model, value)
        node.replace_input_with(index, kept[value])
    return len(kept)


def _keep(model: ir.Model, value: ir.Value) -> ir.Value:
    name, source = f"{value.name}/kept", value.producer()
    assert source is not None
    node = ir.node("Max", [value, constant(model, f"{name}/least", np.finfo(np.float32).min)], name=name)
    made = node.outputs[0]
    made.name, made.dtype, made.shape = name, value.dtype, value.shape
    model.graph.insert_after(source, node)
    return made


def _reads(node: ir.Node, seen: set[ir.Node]) -> Iterator[tuple[ir.Node, int]]:
    """Where what a node normalizes or adds comes from a dequantizer of activations: the reader, and which input."""
    seen.add(node)
    for index, value in enumerate(node.inputs[:1] if node.op_type in _NORMS else node.inputs):
        source = value.producer() if value is not None else None
        if source is None:
            continue
        if source.op_type == DEQUANTIZE and source.inputs[0] is not None and source.inputs[0].const_value is None:
            yield node, index
        elif source.op_type in _THROUGH and source not in seen:
            yield from _reads(source, seen)
