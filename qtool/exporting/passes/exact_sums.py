"""Lets a file be opened so that no product saturates on an x86 CPU without VNNI.

There ONNX Runtime keeps the sum of two products of bytes in 16 bits, which it may leave (``saturation.py``), unless it
is told by ``session.x64quantprecision`` to multiply in 16 bits and add in 32. It then stores weights beyond 7 bits as
unsigned bytes, under names made of the old ones: version 1.31 does not open a file in which two layers share a zero
point, as exporters store equal constants, or a weight. So each has a zero point of its own, and layers after the first
read a weight through a Reshape, which makes a copy as the file is opened (each of the last copy: equal Reshapes would
be made one). The file says in its metadata how it is to be opened.

Files that need no such thing say nothing: weights of 7 bits cannot saturate, and where weights alone are integers no
bytes are multiplied by them. Told to, the runtime would give those up for float products.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE, WEIGHTED
from qtool.exporting.passes.parts import MOVES, constant, dequantized
from qtool.lstm import OPERATOR
from qtool.runtimes.onnx_notes import EXACT_SUMS, SESSION

MOST = 64
"""Two products of a byte with weights up to this fit into 16 bits; ONNX Runtime leaves those as they are."""


def apply(model: ir.Model) -> int:
    """Rewrites in place, behind all other passes; returns how many weights and zero points are others."""
    if not _may_saturate(model):
        return 0
    last: dict[ir.Value, ir.Value] = {}
    zeros: set[ir.Value] = set()
    changed = 0
    for node in list(model.graph):
        for place, (holder, weight, zero_point) in enumerate(_weights(node)):
            stored = holder.inputs[weight]
            if stored is None or _signed(stored) is None:
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


def _may_saturate(model: ir.Model) -> bool:
    """Whether bytes are multiplied here by weights of which two may leave 16 bits, as the runtime sees it."""
    if not any(node.op_type == OPERATOR or _gives_activations(node) for node in model.graph):
        return False
    stored = {holder.inputs[weight] for node in model.graph for holder, weight, _ in _weights(node)}
    found = [numbers for value in stored if value is not None and (numbers := _signed(value)) is not None]
    return any(np.abs(numbers.astype(np.int16)).max(initial=0) > MOST for numbers in found)


def _gives_activations(node: ir.Node) -> bool:
    """Whether a node dequantizes what was computed, and no weight or row of a table."""
    return node.op_type == DEQUANTIZE and (value := node.inputs[0]) is not None and _source(value).const_value is None


def _signed(value: ir.Value) -> npt.NDArray[np.int8] | None:
    """What is stored of it as signed bytes, moved or not."""
    found = _source(value).const_value
    return found.numpy() if found is not None and found.dtype == ir.DataType.INT8 else None


def _source(value: ir.Value) -> ir.Value:
    """What a value is moved from."""
    while (maker := value.producer()) is not None and maker.op_type in MOVES and maker.inputs[0] is not None:
        value = maker.inputs[0]
    return value


def _copied(model: ir.Model, node: ir.Node, stored: ir.Value, name: str) -> ir.Value:
    assert stored.shape is not None
    shape = constant(model, f"{name}/shape", np.array(stored.shape.numpy(), np.int64))
    move = ir.node("Reshape", [stored, shape], name=name)
    copy: ir.Value = move.outputs[0]
    copy.name, copy.dtype, copy.shape = name, stored.dtype, stored.shape
    model.graph.insert_before(node, move)
    return copy
