"""Repeats a channel's gate along the rows of the feature map that it multiplies.

Squeeze-excite multiplies each channel of ``[N, C, H, W]`` by one number, ``[N, C, 1, 1]``. A runtime that keeps
channels innermost multiplies pixel by pixel, ``C`` bytes a time, and where ``C`` is small spends more time on beginning
than on multiplying. Repeated along the rows, ``[N, C, 1, W]``, the gate is multiplied row by row, ``W·C`` bytes a time.
The products are the same; what is copied is one row, by Tile, which such a runtime does with channels innermost too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import between_integers, constant, shape_of

MOST_CHANNELS = 256
"""Beyond, a pixel's channels are bytes enough."""


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many gates were repeated."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or not between_integers(node, 2):
            continue
        for index in (0, 1):
            width = _width(node.inputs[1 - index])
            if width is not None and _is_gate(node.inputs[index]):
                _repeat(model, node, index, width)
                changed += 1
    return changed


def _width(value: ir.Value | None) -> int | None:
    """The length of a feature map's rows; None where it is no such map, or one of many channels."""
    shape = shape_of(value)
    if len(shape) != 4 or not all(isinstance(size, int) for size in shape[1:]):
        return None
    channels, _, width = shape[1:]
    return width if width > 1 and channels <= MOST_CHANNELS else None


def _is_gate(value: ir.Value | None) -> bool:
    """Whether this is one number for each channel, computed, not stored."""
    source = value.producer() if value is not None else None
    integers = source.inputs[0] if source is not None else None
    return shape_of(value)[2:] == [1, 1] and integers is not None and not integers.is_initializer()


def _repeat(model: ir.Model, node: ir.Node, index: int, width: int) -> None:
    """Puts a Tile before the gate's dequantizer, where it copies bytes."""
    gate = node.inputs[index]
    source = gate.producer() if gate is not None else None
    assert gate is not None
    assert source is not None
    assert source.inputs[0] is not None
    name = f"{node.name or node.outputs[0].name}/gate"
    times = constant(model, f"{name}/times", np.array([1, 1, 1, width]))
    tile = ir.node("Tile", [source.inputs[0], times], name=name)
    restored = ir.node(
        "DequantizeLinear", [tile.outputs[0], *source.inputs[1:]], source.attributes, name=f"{name}/wide"
    )
    for made, dtype in ((tile, source.inputs[0].dtype), (restored, gate.dtype)):
        made.outputs[0].name, made.outputs[0].dtype = made.name, dtype
        made.outputs[0].shape = ir.Shape([*shape_of(gate)[:3], width])
    model.graph.insert_before(node, [tile, restored])
    node.replace_input_with(index, restored.outputs[0])
    if not gate.consumers() and not gate.is_graph_output():
        model.graph.remove(source, safe=True)
