"""Dequantizes in front of a norm, whose epsilon is for real numbers, and of a sum with floats, of small numbers.

OpenVINO (2026.4) takes a scale s through sums and norms, as if a norm of numbers s times as large were the same:

    norm(s · x, ε) = norm(x, ε / s²)

Where the variance is not far above ε that is another answer (a stream of 0.02 behind a parallel block of a Falcon,
arXiv 2311.16867: 37 dB). Where integers are added to floats it forgets a zero point z with s · z below 10⁻⁵ (−11 dB of
a MobileViT whose numbers are that small). It takes nothing past a Max, and the greater of a number and the least of all
is the number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import MOVES, constant, zeros_of

_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization")
_SUMS = ("Add", "Sub")
_THROUGH = (*_SUMS, *MOVES)
_FORGOTTEN = 2e-5


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many dequantized values are kept in front of norms and sums."""
    kept: dict[ir.Value, ir.Value] = {}
    nodes = list(model.graph)
    _keep_each(model, [read for node in nodes if node.op_type in _NORMS for read in _reads(node, set())], kept)
    _keep_each(model, [read for node in nodes if node.op_type in _SUMS for read in _faint(node)], kept)
    return len(kept)


def _keep_each(model: ir.Model, reads: list[tuple[ir.Node, int]], kept: dict[ir.Value, ir.Value]) -> None:
    """Has each reader read what is kept of its input; what is kept already is there."""
    for node, index in dict.fromkeys(reads):
        value = node.inputs[index]
        assert value is not None
        if value not in kept:
            kept[value] = _keep(model, value)
        node.replace_input_with(index, kept[value])


def _keep(model: ir.Model, value: ir.Value) -> ir.Value:
    name, source = f"{value.name}/kept", value.producer()
    assert source is not None
    node = ir.node("Max", [value, constant(model, f"{name}/least", np.finfo(np.float32).min)], name=name)
    made = node.outputs[0]
    made.name, made.dtype, made.shape = name, value.dtype, value.shape
    model.graph.insert_after(source, node)
    return made


def _faint(node: ir.Node) -> list[tuple[ir.Node, int]]:
    """Where a sum with floats reads dequantized integers of a faint zero point."""
    found = [_origin(node, index) for index in range(len(node.inputs))]
    if all(found):
        return []
    return [read for read in found if read is not None and _is_faint(read)]


def _origin(node: ir.Node, index: int) -> tuple[ir.Node, int] | None:
    """Where what a node reads, moved or not, comes from a dequantizer of activations: the reader, and which input."""
    value = node.inputs[index]
    source = value.producer() if value is not None else None
    if source is None or source.op_type not in (DEQUANTIZE, *MOVES) or source.inputs[0] is None:
        return None
    if source.op_type in MOVES:
        return _origin(source, 0)
    return (node, index) if source.inputs[0].const_value is None else None


def _is_faint(read: tuple[ir.Node, int]) -> bool:
    value = read[0].inputs[read[1]]
    source = value.producer() if value is not None else None
    assert source is not None
    scale, zero = source.inputs[1], zeros_of(source)
    if scale is None or scale.const_value is None or zero is None:
        return False
    offset = np.abs(scale.const_value.numpy().astype(np.float64) * zero)
    return bool(((offset > 0) & (offset < _FORGOTTEN)).any())


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
