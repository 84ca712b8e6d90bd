"""Embedding tables in bytes: each row with a scale of its own, read row by row and dequantized.

A lookup copies rows, and a language model's table can be a third of its weights: ``row ≈ scale · q`` with
``scale = max|row| / 127`` makes it four times smaller, and what is read goes on in float. A layer that shares the
table, as the last one often does, shares its integers too where they are the same.

Left out on purpose: tables of few rows, whose bytes do not matter.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.quantization.capture import aten, parameter
from qtool.quantization.integers import store_before
from qtool.quantization.placement import Placement
from qtool.quantization.qparams import symmetric_qparams

QMAX = 127


def quantize_tables(graph_module: GraphModule, placement: Placement) -> int:
    """Stores the tables of the placement's lookups as int8, in place, and tells their units; returns how many."""
    wanted = {p.unit.name: p for p in placement.placed if p.pattern is not None and p.pattern.kind == "embedding"}
    lookups = [
        n for n in graph_module.graph.nodes if n.target is aten.embedding.default and n.meta.get("unit") in wanted
    ]
    shared = [n for n in graph_module.graph.nodes if n.target is quantized.dequantize_per_channel.default]
    for node in lookups:
        table = parameter(graph_module, node.args[0])
        assert table is not None
        rows = _rows(graph_module, node, table, shared)
        node.update_arg(0, rows)
        shared.append(rows)
        placed = wanted[node.meta["unit"]]
        placed.unit = dataclasses.replace(placed.unit, weight_bits=8)
    return len(lookups)


def _rows(graph_module: GraphModule, node: Node, table: Tensor, shared: list[Node]) -> Node:
    """The table dequantized: of integers that another layer has already, or of its own."""
    scales = symmetric_qparams(table.abs().amax(1), QMAX, where=f"layer '{node.meta['unit']}'")
    integers = torch.round(table / scales[:, None]).clamp(-QMAX, QMAX).to(torch.int8)
    other = next((n for n in shared if _holds(graph_module, n, integers, scales)), None)
    if other is None:
        values = {
            "table": integers,
            "table_scale": scales,
            "table_zero_point": torch.zeros(len(scales), dtype=torch.int64),
        }
        stored = [store_before(graph_module, node, f"{node.name}_{name}", value) for name, value in values.items()]
    else:
        with graph_module.graph.inserting_before(node):  # what the other reads may stand behind this one
            stored = [graph_module.graph.get_attr(str(source.target)) for source in other.all_input_nodes]
    with graph_module.graph.inserting_before(node):
        return graph_module.graph.call_function(
            quantized.dequantize_per_channel.default, (*stored, 0, -QMAX, QMAX, torch.int8)
        )


def _holds(graph_module: GraphModule, node: Node, integers: Tensor, scales: Tensor) -> bool:
    """Whether a dequantize reads these very integers and scales, row by row."""
    if node.args[3] != 0:
        return False
    found = [parameter(graph_module, argument) for argument in node.args[:2]]
    return all(
        mine is not None and mine.shape == wanted.shape and mine.dtype == wanted.dtype and torch.equal(mine, wanted)
        for mine, wanted in zip(found, (integers, scales), strict=True)
    )
