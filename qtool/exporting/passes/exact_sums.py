"""Lets a file be opened so that no product saturates on an x86 CPU without VNNI.

There ONNX Runtime keeps the sum of two products of bytes in 16 bits, which it may leave (``saturation.py``), unless it
is told by ``session.x64quantprecision`` to multiply in 16 bits and add in 32. It then stores weights that could
saturate as unsigned bytes, under names made of the old ones: version 1.31 does not open a file in which two layers
share a zero point, as exporters store equal constants, or a weight. So each has a zero point of its own, and layers
after the first read a weight through a Reshape, which makes a copy as the file is opened (each of the last copy:
equal Reshapes would be made one). The file says in its metadata how it is to be opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE, WEIGHTED
from qtool.exporting.passes.parts import MOVES, constant, dequantized
from qtool.lstm import OPERATOR
from qtool.runtimes.ort import EXACT_SUMS, SESSION


def apply(model: ir.Model) -> int:
    """Rewrites in place, behind all other passes; returns how many weights and zero points are others."""
    last: dict[ir.Value, ir.Value] = {}
    zeros: set[ir.Value] = set()
    changed = 0
    for node in list(model.graph):
        for place, (holder, weight, zero_point) in enumerate(_weights(node)):
            stored = holder.inputs[weight]
            if stored is None or not _is_signed(stored):
                continue
            name = f"{node.outputs[0].name}/weight_{place}"
            copy = _copied(model, node, last[stored], name) if stored in last else stored
            zero = own = holder.inputs[zero_point] if len(holder.inputs) > zero_point else None
            if zero is not None and zero in zeros and zero.const_value is not None:
                own = constant(model, f"{name}/zero_point", zero.const_value.numpy())
            changed += (copy is not stored) + (own is not zero)
            last[stored] = copy
            zeros |= {own} if own is not None else set()
            if holder is not node and copy is not stored:
                inputs = [copy, holder.inputs[1], *([own] if own is not None else [])]
                dequantized(model, node, 1, inputs, f"{name}/dequantized")
                continue
            holder.replace_input_with(weight, copy)
            if own is not zero:
                holder.replace_input_with(zero_point, own)
    drop_unused(model)
    model.metadata_props[SESSION] = json.dumps({EXACT_SUMS: "1"})
    return changed


def _weights(node: ir.Node) -> Iterator[tuple[ir.Node, int, int]]:
    """What reads a layer's weights, which of its inputs these are, and which their zero points."""
    if node.op_type == OPERATOR:
        yield from ((node, 1, 9), (node, 2, 11))
    elif node.op_type in WEIGHTED and (value := node.inputs[1]) is not None:
        source = value.producer()
        if source is not None and source.op_type == DEQUANTIZE:
            yield source, 0, 2


def _is_signed(value: ir.Value) -> bool:
    """Whether it is stored as signed bytes, moved or not."""
    while (source := value.producer()) is not None and source.op_type in MOVES and source.inputs[0] is not None:
        value = source.inputs[0]
    return value.const_value is not None and value.const_value.dtype == ir.DataType.INT8


def _copied(model: ir.Model, node: ir.Node, stored: ir.Value, name: str) -> ir.Value:
    assert stored.shape is not None
    shape = constant(model, f"{name}/shape", np.array(stored.shape.numpy(), np.int64))
    move = ir.node("Reshape", [stored, shape], name=name)
    copy: ir.Value = move.outputs[0]
    copy.name, copy.dtype, copy.shape = name, stored.dtype, stored.shape
    model.graph.insert_before(node, move)
    return copy
