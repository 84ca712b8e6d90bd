"""Takes the zero point of what linear layers alone read into their biases.

    s · (q − z) W + b  =  s · q W + (b − s · z · Σ W)

Σ W being the sums of the weight's columns. OpenVINO (2026.4) subtracts the zero point's share behind the product, in a
step of its own, and takes another kernel than where a bias alone is added: on a CPU with AMX the linear layers of a
ViT-S/16 took 1.5 times as long as without.

Left out on purpose: layers without a bias, which would gain a step for the one that they lose, and values that
something else reads as well, whose zero point stays as it is in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import MOVES, constant, zeros_of

Numbers = npt.NDArray[np.float64]


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many linear layers took a zero point in."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != DEQUANTIZE or (zeros := zeros_of(node)) is None or zeros.size != 1 or not zeros.any():
            continue
        layers = _readers(node.outputs[0])
        scale = _stored(node.inputs[1])
        if not layers or scale is None or scale.size != 1 or _stored(node.inputs[0]) is not None:
            continue
        node.replace_input_with(2, constant(model, f"{node.outputs[0].name}/no_zero_point", np.zeros_like(zeros)))
        for layer in layers:
            numbers = layer.bias - scale.item() * zeros.item() * layer.columns
            _replace(model, layer, numbers.astype(np.float32))
        changed += len(layers)
    drop_unused(model)
    return changed


@dataclass(frozen=True)
class _Layer:
    """A product with a stored weight of int8: the sums of its columns, and where which numbers are added to it."""

    columns: Numbers
    bias: Numbers
    adds: ir.Node
    index: int


def _readers(value: ir.Value) -> list[_Layer]:
    """The linear layers that read a value, moved or not; none where something else does too."""
    found: list[_Layer] = []
    for node, index in value.uses():
        moved = node.op_type in MOVES and index == 0
        read = [layers for made in node.outputs for layers in _readers(made)] if moved else [_layer(node, index)]
        if not read or None in read:
            return []
        found += [layer for layer in read if layer is not None]
    return [] if value.is_graph_output() else found


def _layer(node: ir.Node, index: int) -> _Layer | None:
    weight = _weight(node) if index == 0 else None
    if weight is None:
        return None
    columns, result = weight.sum(0), node.outputs[0]
    adds, place = node, 2
    if node.op_type == "MatMul":
        if len(result.uses()) != 1 or result.is_graph_output():
            return None
        ((adds, read),) = result.uses()
        place = 1 - read
    bias = _stored(adds.inputs[place]) if adds.op_type in ("Add", "Gemm") and place < len(adds.inputs) else None
    if bias is None or bias.size != len(columns) or bias.shape[-1] != len(columns) or bias.ndim > 2:
        return None
    return _Layer(columns, bias.reshape(-1), adds, place)


def _weight(node: ir.Node) -> Numbers | None:
    """What a MatMul or Gemm multiplies by, inputs × outputs, where that is stored in int8; None of anything else."""
    told = node.attributes
    plain = told.get_float("alpha", 1.0) == told.get_float("beta", 1.0) == 1 and not told.get_int("transA", 0)
    if node.op_type not in ("MatMul", "Gemm") or not plain or node.inputs[1] is None:
        return None
    source, turned = node.inputs[1].producer(), told.get_int("transB", 0) != 0
    if source is not None and source.op_type == "Transpose" and source.inputs[0] is not None:
        source, turned = source.inputs[0].producer(), not turned
    value = source.outputs[0] if source is not None and source.op_type == DEQUANTIZE else None
    stored = source.inputs[0].const_value if value is not None and source.inputs[0] is not None else None
    numbers = _stored(value) if stored is not None and stored.dtype == ir.DataType.INT8 else None
    if numbers is None or numbers.ndim != 2:
        return None
    return numbers.T if turned else numbers


def _stored(value: ir.Value | None) -> Numbers | None:
    """The numbers of a constant, dequantized without a zero point or not; None of anything else, or of blocks."""
    if (numbers := _constant(value)) is not None:
        return numbers
    source = value.producer() if value is not None else None
    if source is None or source.op_type != DEQUANTIZE or source.attributes.get_int("block_size", 0):
        return None
    integers, scales, zeros = _constant(source.inputs[0]), _constant(source.inputs[1]), zeros_of(source)
    if integers is None or scales is None or zeros is None or zeros.any():
        return None
    shape = [1] * integers.ndim
    if scales.size > 1:
        shape[source.attributes.get_int("axis", 1)] = -1
    return integers * scales.reshape(shape)


def _constant(value: ir.Value | None) -> Numbers | None:
    stored: Any = value.const_value if value is not None else None
    return stored.numpy().astype(np.float64) if stored is not None else None


def _replace(model: ir.Model, layer: _Layer, numbers: npt.NDArray[np.float32]) -> None:
    """Adds other numbers than before; what dequantized these goes where nothing else reads it."""
    old = layer.adds.inputs[layer.index]
    made = constant(model, f"{layer.adds.outputs[0].name}/shifted_bias", numbers)
    layer.adds.replace_input_with(layer.index, made)
    source = old.producer() if old is not None else None
    if source is not None and old is not None and not old.consumers() and not old.is_graph_output():
        model.graph.remove(source, safe=True)
