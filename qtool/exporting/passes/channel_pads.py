"""Pads the channels of integers with their zero point, where a runtime would pad what was dequantized.

OpenVINO (2026.4) moves a dequantizer past a Slice or a Concat of channels with a scale and a zero point for each of
them, and on past a padding of channels, which has others: it fills up with another number (−11 dB), or compiles nothing
where such a padding is cut again. A dequantizer that stands behind the padding needs to move nowhere.

Left out on purpose: other numbers than zero, and paddings that are computed or name their axes.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtool.exporting.passes.activations import qparams
from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import MOVES, zero_padding

CHANNELS = 1


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many paddings work on integers now."""
    found = [(node, steps) for node in model.graph if _adds_channels(node) and (steps := _from_integers(node))]
    for node, steps in found:
        _rewrite(model, node, steps)
    if found:
        RemoveUnusedNodesPass()(model)
    return len(found)


def _adds_channels(node: ir.Node) -> bool:
    amounts = zero_padding(node)
    return amounts is not None and amounts.shape[1] > CHANNELS and bool(amounts[:, CHANNELS].max() > 0)


def _from_integers(node: ir.Node) -> list[ir.Node]:
    """A dequantizer with one scale, and what moves its numbers on the way to ``node``; nothing where it is not so."""
    steps: list[ir.Node] = []
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    while source is not None and source.op_type in MOVES and len(source.outputs) == 1 and source.inputs[0] is not None:
        steps.insert(0, source)
        source = source.inputs[0].producer()
    if source is None or source.op_type != DEQUANTIZE or qparams(source) is None:
        return []
    return [source, *steps]


def _rewrite(model: ir.Model, node: ir.Node, steps: list[ir.Node]) -> None:
    dequantize, *moves = steps
    integers, scale, zero = dequantize.inputs[:3]
    assert integers is not None
    result, value, made = node.outputs[0], integers, []
    for index, move in enumerate(moves):
        made.append(ir.node(move.op_type, [value, *move.inputs[1:]], move.attributes, name=f"{result.name}/{index}"))
        value = made[-1].outputs[0]
        value.shape = move.outputs[0].shape
    made.append(ir.node("Pad", [value, node.inputs[1], zero], name=node.name))
    for each in made:
        each.outputs[0].name, each.outputs[0].dtype = f"{each.name}/integers", integers.dtype
    made[-1].outputs[0].shape = result.shape
    made.append(ir.node(DEQUANTIZE, [made[-1].outputs[0], scale, zero], name=f"{node.name}/restored"))
    model.graph.insert_before(node, made)
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], [], [result], made[-1].outputs)
