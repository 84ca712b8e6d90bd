"""What several passes look for and make: operators between integers, their weights, constants, dequantized ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.names import DEQUANTIZE, WEIGHTED

MOVES = ("Reshape", "Transpose", "Gather", "Slice", "Split", "Squeeze", "Unsqueeze", "Flatten", "Expand")
"""Operators that give the numbers that they read, elsewhere, and compute none."""
MOST_GROWTH, MOST_IN_ALL = 0.02, 0.045
"""How much of a file's constants a pass may add in zeros, and all of them: the size gate lets 5 % by."""
_AT_FIRST = "qtool.num_stored"


def between_integers(node: ir.Node, inputs: int = 1) -> bool:
    """Whether the first inputs of an operator come from dequantizers, and only quantizers read what it gives."""
    sources = [value.producer() if value is not None else None for value in node.inputs[:inputs]]
    users = node.outputs[0].consumers()
    return (
        all(source is not None and source.op_type == "DequantizeLinear" for source in sources)
        and bool(users)
        and all(user.op_type == "QuantizeLinear" for user in users)
    )


def is_read(node: ir.Node, operators: Collection[str], through: Collection[str]) -> bool:
    """Whether one of these operators reads what a node gives, or what others that are gone ``through`` make of it."""
    users = node.outputs[0].consumers()
    return any(u.op_type in operators or (u.op_type in through and is_read(u, operators, through)) for u in users)


def room(model: ir.Model, share: float) -> float:
    """How many numbers a pass may add to a file's constants, whose number before the first of them is kept."""
    values = model.graph.initializers.values()
    stored = sum(value.const_value.size for value in values if value.const_value is not None)
    first: int = model.meta.setdefault(_AT_FIRST, stored)
    return float(min(share * first, max(share, MOST_IN_ALL) * first - (stored - first)))


def layer_unit(layer: ir.Node) -> str | None:
    """The unit of a layer with a weight, by its name: a reshape may be the unit's first operator."""
    return (layer.name or "").partition("/")[0] if layer.op_type in WEIGHTED else None


def dequantizer_of(node: ir.Node) -> ir.Node | None:
    """What dequantizes the stored weight of a layer, behind the reshape that joins its groups or not."""
    source = node.inputs[1].producer() if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if source is not None and source.op_type == "Reshape" and source.inputs[0] is not None:
        source = source.inputs[0].producer()
    if source is None or source.op_type != "DequantizeLinear" or source.inputs[0] is None:
        return None
    return source if source.inputs[0].const_value is not None else None


def shape_of(value: ir.Value | None) -> list[int | ir.SymbolicDim]:
    """The sizes of a tensor; none where they are not known."""
    return list(value.shape) if value is not None and value.shape is not None else []


def zeros_of(dequantize: ir.Node) -> npt.NDArray[Any] | None:
    """The zero points of a DequantizeLinear, 0 where it names none; None where they are computed."""
    value = dequantize.inputs[2] if len(dequantize.inputs) > 2 else None
    if value is None:
        return np.zeros((), np.int8)
    return value.const_value.numpy() if value.const_value is not None else None


def unmoved(value: ir.Value | None) -> ir.Value | None:
    """What a value was before operators moved its bytes."""
    while value is not None and (source := value.producer()) is not None and source.op_type in MOVES:
        value = source.inputs[0]
    return value


def moves_signed(dequantize: ir.Node) -> bool:
    """Whether a node dequantizes int8 activations for an operator that only moves them."""
    source = dequantize.inputs[0] if dequantize.op_type == DEQUANTIZE else None
    if source is None or source.const_value is not None or (zeros := zeros_of(dequantize)) is None:
        return False
    return zeros.dtype == np.int8 and any(user.op_type in MOVES for user in dequantize.outputs[0].consumers())


def integer_taps(conv: ir.Node) -> npt.NDArray[np.int8] | None:
    """The stored int8 weight, zero points 0, of a convolution between integers; None of anything else."""
    if conv.op_type != "Conv":
        return None
    source, weight = (value.producer() if value is not None else None for value in conv.inputs[:2])
    if source is None or weight is None or {source.op_type, weight.op_type} != {"DequantizeLinear"}:
        return None
    stored, zeros = weight.inputs[0], zeros_of(weight)
    if stored is None or stored.const_value is None or zeros is None or zeros.any():
        return None
    taps = stored.const_value.numpy()
    return taps if taps.dtype == np.int8 else None


def zero_padding(node: ir.Node) -> npt.NDArray[np.int64] | None:
    """What a Pad puts to each axis, 2 × rank, before and behind; None where it is no stored padding with zeros."""
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return None
    amounts, value, axes = ([*node.inputs[1:], None, None, None])[:3]
    if axes is not None or amounts is None or amounts.const_value is None:
        return None
    if value is not None and (value.const_value is None or value.const_value.numpy().any()):
        return None
    given: npt.NDArray[np.int64] = amounts.const_value.numpy().reshape(2, -1)
    return given


def constant(model: ir.Model, name: str, numbers: npt.NDArray[Any] | np.generic) -> ir.Value:
    """A new constant of a file."""
    tensor = ir.tensor(np.asarray(numbers), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def dequantized(model: ir.Model, reader: ir.Node, index: int, inputs: Sequence[ir.Value | None], name: str) -> ir.Node:
    """Gives ``reader`` another dequantized constant in the place of one, which goes where nothing else reads it.

    Returns its dequantizer.
    """
    old = reader.inputs[index]
    source = old.producer() if old is not None else None
    assert old is not None
    assert source is not None
    assert inputs[0] is not None
    made = ir.node("DequantizeLinear", inputs, source.attributes, name=name)
    made.outputs[0].name, made.outputs[0].dtype, made.outputs[0].shape = name, old.dtype, inputs[0].shape
    model.graph.insert_before(reader, made)
    reader.replace_input_with(index, made.outputs[0])
    if not old.consumers() and not old.is_graph_output():
        model.graph.remove(source, safe=True)
    return made
