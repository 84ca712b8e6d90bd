"""Has a reduction keep its axes, or drop them, until the numbers are at hand, where a quantizer reads it.

OpenVINO (2026.4) moves the scale and zero point of a product of integers that has no bias behind the mean that reads
it, and forgets the zero point where the mean drops its axes: a classifier behind ``linear(x).mean(1)`` then gives other
numbers altogether (−11 dB). A mean that keeps them, with a Squeeze behind it, is right. Of dequantized integers it is
the other way about, and their means are left. A quantizer behind a maximum or minimum of floats becomes part of that,
and the numbers are others (0 dB), unless a Squeeze or Unsqueeze lies between; behind a Concat it is moved there.
"""

from __future__ import annotations

import onnx_ir as ir

from qtool.exporting.passes.names import DEQUANTIZE, QUANTIZE
from qtool.exporting.passes.parts import MOVES

_EXTREMES = ("ReduceMax", "ReduceMin")


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many reductions keep their axes, or drop them, for a move behind them."""
    changed = [node for node in model.graph if _is_hurt(node)]
    for node in changed:
        _turn(model, node)
    return len(changed)


def _is_hurt(node: ir.Node) -> bool:
    if node.op_type not in ("ReduceMean", *_EXTREMES) or len(node.inputs) < 2 or _reads_integers(node):
        return False
    result = node.outputs[0]
    is_read = any(user.op_type == QUANTIZE for user in _readers(node)) and not result.is_graph_output()
    return is_read and (node.op_type in _EXTREMES or not _keeps(node))


def _readers(node: ir.Node) -> list[ir.Node]:
    """What reads a node's result, and behind a Concat what reads that."""
    users = node.outputs[0].consumers()
    return [reader for user in users for reader in ([user] if user.op_type != "Concat" else _readers(user))]


def _reads_integers(node: ir.Node) -> bool:
    """Whether what a node reads are dequantized integers, moved or not."""
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    while source is not None and source.op_type in MOVES and source.inputs[0] is not None:
        source = source.inputs[0].producer()
    return source is not None and source.op_type == DEQUANTIZE


def _keeps(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("keepdims", 1))


def _turn(model: ir.Model, node: ir.Node) -> None:
    """Has a reduction keep its axes if it drops them, or drop them, and a move behind it undo that."""
    result, kept = node.outputs[0], _keeps(node)
    node.attributes["keepdims"] = ir.AttrInt64("keepdims", int(not kept))
    move = "Unsqueeze" if kept else "Squeeze"
    name = f"{node.name or result.name}/{move.lower()}d"  # none of names.py's, which call by operators
    made = ir.node(move, [result, node.inputs[1]], name=name)
    moved = made.outputs[0]
    moved.name, moved.dtype, moved.shape = name, result.dtype, result.shape
    result.shape = None
    for use in list(result.uses()):
        if use.node is not made:
            use.node.replace_input_with(use.idx, moved)
    model.graph.insert_after(node, made)
