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

from qtool.exporting.kernel_order import at_risk, matrices
from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE, WEIGHTED
from qtool.exporting.passes.parts import constant, dequantized, unmoved
from qtool.graphs.lstm import OPERATOR
from qtool.runtimes.onnx_notes import EXACT_SUMS, SESSION

SAFE = 63
"""The greatest magnitude of weights that fit beside any others."""


def apply(model: ir.Model) -> int:
    """Rewrites in place, behind all other passes; returns how many weights and zero points are others.

    A file whose weights fit asks for nothing, and opens either way; one of 7 bits, or whose layers multiply no weights
    by bytes, is left as it is.
    """
    if not any(_is_stored_otherwise(holder.inputs[at]) for node in model.graph for holder, at, _ in _weights(node)):
        return 0
    if can_saturate(model):
        model.metadata_props[SESSION] = json.dumps({EXACT_SUMS: "1"})
    last: dict[ir.Value, ir.Value] = {}
    zeros: set[ir.Value] = set()
    changed = 0
    for node in list(model.graph):
        for place, (holder, weight, zero_point) in enumerate(_weights(node)):
            stored = holder.inputs[weight]
            if stored is None or _stored(stored) is None:
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
    return changed


def can_saturate(model: ir.Model) -> bool:
    """Whether the weights of a layer do not fit."""
    kept = ((node, holder.inputs[at], False) for node in model.graph for holder, at, _ in _weights(node))
    turned = ((node, value, True) for node in model.graph for value in _turned(node))
    return any(_do_not_fit(*found) for found in (*kept, *turned))


def _weights(node: ir.Node) -> Iterator[tuple[ir.Node, int, int]]:
    """What reads the weights that a layer multiplies by bytes, which of its inputs they and their zero points are."""
    if node.op_type == OPERATOR:
        yield from ((node, 1, 9), (node, 2, 11))
    elif node.op_type in WEIGHTED:
        read, weight = (value.producer() if value is not None else None for value in node.inputs[:2])
        if read is not None and weight is not None and read.op_type == weight.op_type == DEQUANTIZE:
            yield weight, 0, 2


def _turned(node: ir.Node) -> Iterator[ir.Value | None]:
    """The weights that a product reads turned, as files for OpenVINO have those of linear layers over sequences."""
    if node.op_type == "MatMul":
        read, turn = (value.producer() if value is not None else None for value in node.inputs[:2])
        source = turn.inputs[0] if turn is not None and turn.op_type == "Transpose" else None
        weight = source.producer() if source is not None else None
        if read is not None and weight is not None and read.op_type == weight.op_type == DEQUANTIZE:
            yield weight.inputs[0]


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The signed bytes that a file stores a value as, moved or not."""
    source = unmoved(value)
    tensor = source.const_value if source is not None else None
    return tensor if tensor is not None and tensor.dtype == ir.DataType.INT8 else None


def _is_stored_otherwise(value: ir.Value | None) -> bool:
    """Whether weights are among those that ONNX Runtime stores otherwise: any beyond 7 bits."""
    tensor = _stored(value)
    return tensor is not None and bool(np.abs(tensor.numpy().astype(np.int16)).max(initial=0) > SAFE)


def _do_not_fit(node: ir.Node, value: ir.Value | None, turned: bool) -> bool:
    """Whether neighbours in a kernel's order are too large; of other layers and moved weights, any beyond 7 bits."""
    if not _is_stored_otherwise(value):
        return False
    tensor = _stored(value)
    if tensor is None or unmoved(value) is not value:
        return True
    kind = "Gemm" if turned else node.op_type
    if kind not in ("Conv", "Gemm", OPERATOR) and (kind, len(tensor.shape)) != ("MatMul", 2):
        return True
    groups, transposed = node.attributes.get_int("group", 1), turned or bool(node.attributes.get_int("transB", 0))
    found = matrices(kind, tensor.numpy(), groups=groups, transposed=transposed)
    return any(at_risk(matrix) is not None for matrix in found)


def _copied(model: ir.Model, node: ir.Node, stored: ir.Value, name: str) -> ir.Value:
    assert stored.shape is not None
    shape = constant(model, f"{name}/shape", np.array(stored.shape.numpy(), np.int64))
    move = ir.node("Reshape", [stored, shape], name=name)
    copy: ir.Value = move.outputs[0]
    copy.name, copy.dtype, copy.shape = name, stored.dtype, stored.shape
    model.graph.insert_before(node, move)
    return copy
