"""Weights in bytes where nothing is calibrated: embedding tables, recurrent layers, and experts that stay whole.

A lookup copies rows, and most runtimes compute a recurrent layer in float, and a product with a stack of many or small
matrices. Their size is another matter, since they can be most of a model: ``row ≈ scale · q`` with ``scale = max|row| /
127``, a scale for each row of a table or of a matrix or for each unit of a gate, makes them four times smaller. A layer
that shares a matrix, as the last one often does with the table, shares its integers too where they are the same. Where
the target computes an LSTM in integers that are rounded by their own range at run time, it becomes ``qtool::lstm``
(:mod:`qtool.graphs.lstm`).

Left out on purpose: tables of few rows, whose bytes do not matter; recurrent layers over packed sequences, which have
no form in ONNX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.quantization.integers import store_before
from qtool.quantization.placement import Placement
from qtool.quantization.quantizers.pair_sums import PAIRED, fitting
from qtool.quantization.quantizers.qparams import symmetric_qparams
from qtool.quantization.targets.stored import moved_from, stored_by_rows

QMAX = 127
_PARTS = ("rows", "rows_scale", "hidden_rows", "hidden_rows_scale", "rows_bias")
_GATES = (0, 3, 1, 2)
"""Of torch's order of gates (i, f, c, o) that of ONNX (i, o, f, c)."""


def store_bytes(graph_module: GraphModule, placement: Placement) -> int:
    """Stores tables and recurrent matrices of the placement as int8, in place, and tells their units; how many do."""
    wanted = {p.unit.name: p for p in placement.placed if p.pattern is not None and p.pattern.stored}
    anchors = {name: placed.anchor.target for name, placed in wanted.items()}
    readers = [n for n in graph_module.graph.nodes if anchors.get(n.meta.get("unit")) is n.target]
    shared = [n for n in graph_module.graph.nodes if n.target is quantized.dequantize_per_channel.default]
    made: dict[Node, Node] = {}
    lstms: dict[tuple[Node, ...], list[Node]] = {}
    for node in readers:
        placed = wanted[str(node.meta["unit"])]
        if is_integer_lstm(node, placement):
            qmax = lstm_qmax(placement)
            params = tuple(cast(list[Node], node.args[2]))
            if params not in lstms:
                lstms[params] = _stored_layers(graph_module, node, qmax)
            _write_integer_lstm(graph_module, node, lstms[params])
            placed.unit = dataclasses.replace(placed.unit, integer=True, reason="", weight_bits=(2 * qmax).bit_length())
            continue
        lines = {part for value in node.all_input_nodes for part in moved_from(value)}
        for index, matrix in enumerate(dict.fromkeys(stored_by_rows(node))):
            if matrix not in made:
                made[matrix] = _dequantized(graph_module, node, matrix, f"{node.name}_{index}", shared)
            for reader in [reader for reader in matrix.users if reader is node or reader in lines]:
                reader.replace_input_with(matrix, made[matrix])
        placed.unit = dataclasses.replace(placed.unit, weight_bits=8)
    graph_module.graph.eliminate_dead_code()
    return len(readers)


def is_integer_lstm(node: Node, placement: Placement) -> bool:
    """Whether the target computes a recurrent layer in integers."""
    return placement.target.integer_lstm and _has_plain_gates(node)


def lstm_qmax(placement: Placement) -> int:
    """The greatest integer of an LSTM that computes in integers: 7 bits where that is for the sake of the kernels."""
    return placement.target.weight.qmax if placement.target.weight.bits == 7 else QMAX


def _has_plain_gates(node: Node) -> bool:
    """Whether a recurrent layer is an LSTM whose hidden state is not projected."""
    if node.target is not aten.lstm.input:
        return False
    _, _, params, has_biases, layers, _, _, bidirectional, _ = cast(tuple[Any, ...], node.args)
    return bool(len(params) == layers * (2 if bidirectional else 1) * (4 if has_biases else 2))


def _stored_layers(graph_module: GraphModule, node: Node, qmax: int) -> list[Node]:
    """The parts of all layers of an LSTM, as constants that stand before it."""
    _, _, params, has_biases, layers, _, _, bidirectional, _ = cast(tuple[Any, ...], node.args)
    weights = [_stored(graph_module, value) for value in params]
    count, width = 4 if has_biases else 2, 2 if bidirectional else 1
    each = [weights[start : start + count] for start in range(0, len(weights), count)]
    stored = []
    for index in range(layers):
        parts = _layer(each[width * index : width * (index + 1)], qmax, node.meta["unit"], node.meta.get(PAIRED))
        for name, part in zip(_PARTS, parts, strict=True):
            stored.append(store_before(graph_module, node, f"{node.name}_{index}_{name}", part))
    return stored


def _write_integer_lstm(graph_module: GraphModule, node: Node, stored: list[Node]) -> None:
    """Writes an LSTM as the operator over integers, in place."""
    x, hx, *_, bidirectional, batch_first = cast(tuple[Any, ...], node.args)
    with graph_module.graph.inserting_before(node):
        integer = graph_module.graph.call_function(
            torch.ops.qtool.lstm.default, (x, hx, stored, bidirectional, batch_first)
        )
    integer.meta = dict(node.meta)
    node.replace_all_uses_with(integer)
    graph_module.graph.erase_node(node)


def _layer(directions: Sequence[Sequence[Tensor]], qmax: int, unit: str, paired: int | None = None) -> list[Tensor]:
    """The parts of one layer of an LSTM from torch's parameters of its directions."""
    found = []
    for weight, hidden, *biases in directions:
        ordered = [_ordered(bias) for bias in (biases or [weight.new_zeros(len(weight))] * 2)]
        own = [part for matrix in (weight, hidden) for part in _columns(_ordered(matrix), qmax, unit, paired)]
        found.append([*own, torch.cat(ordered)])
    return [torch.stack(parts).contiguous() for parts in zip(*found, strict=True)]


def _ordered(gates: Tensor) -> Tensor:
    """Rows of four gates in ONNX's order."""
    parts = gates.chunk(4)
    return torch.cat([parts[index] for index in _GATES])


def _columns(matrix: Tensor, qmax: int, unit: str, paired: int | None) -> tuple[Tensor, Tensor]:
    """The integers of a matrix, transposed, and the scale of each of its rows."""
    integers, scales = _integers(matrix, qmax, unit, paired)
    return integers.T, scales


def _stored(graph_module: GraphModule, node: Node) -> Tensor:
    value = parameter(graph_module, node)
    assert value is not None
    return value


def _integers(matrix: Tensor, qmax: int, unit: str, paired: int | None = None) -> tuple[Tensor, Tensor]:
    """The integers of a matrix and the scale of each of its rows; ``paired`` ones fit sums of 16 bits."""
    ends = fitting(matrix.abs().amax(1), matrix, paired)
    scales = symmetric_qparams(ends, qmax, where=f"layer '{unit}'")
    return torch.round(matrix / scales[:, None]).clamp(-qmax, qmax).to(torch.int8), scales


def _dequantized(graph_module: GraphModule, node: Node, matrix: Node, name: str, shared: list[Node]) -> Node:
    """The matrix dequantized: of integers that another of ``shared`` has already, or of its own, which are added.

    A stack of matrices is dequantized as the rows of all, and takes its shape again.
    """
    weight, first = _stored(graph_module, matrix), min(matrix.users)
    integers, scales = _integers(weight.reshape(-1, weight.shape[-1]), QMAX, node.meta["unit"])
    other = next((n for n in shared if _holds(graph_module, n, integers, scales)), None)
    if other is None:
        values = {
            "rows": integers,
            "rows_scale": scales,
            "rows_zero_point": torch.zeros(len(scales), dtype=torch.int64),
        }
        stored = [store_before(graph_module, first, f"{name}_{word}", value) for word, value in values.items()]
    else:
        with graph_module.graph.inserting_before(first):  # what the other reads may stand behind this one
            stored = [graph_module.graph.get_attr(str(source.target)) for source in other.all_input_nodes]
    with graph_module.graph.inserting_before(first):
        made = graph_module.graph.call_function(
            quantized.dequantize_per_channel.default, (*stored, 0, -QMAX, QMAX, torch.int8)
        )
        shared.append(made)
        if weight.dim() == 2:
            return made
        return graph_module.graph.call_function(aten.reshape.default, (made, list(weight.shape)))


def _holds(graph_module: GraphModule, node: Node, integers: Tensor, scales: Tensor) -> bool:
    """Whether a dequantize reads these very integers and scales, row by row."""
    if node.args[3] != 0:
        return False
    found = [parameter(graph_module, argument) for argument in node.args[:2]]
    return all(
        mine is not None and mine.shape == wanted.shape and mine.dtype == wanted.dtype and torch.equal(mine, wanted)
        for mine, wanted in zip(found, (integers, scales), strict=True)
    )
