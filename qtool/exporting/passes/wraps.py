"""Writes a circular padding as what it is: the end of an axis before its beginning, and the beginning behind its end.

OpenVINO (2026.4) opens no file with a Pad of mode ``wrap``. Along each axis that is padded by b before and e behind,

    Pad(x) = Concat(x[-b:], x, x[:e]).

Between quantizers of one meaning these are integers: joined as floats, their zero points become one for each place
along the axis, and the convolution that reads them runs in float.

Left out on purpose: paddings that are computed, that name their axes, or that cut off.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.pads import on_integers
from qtool.exporting.passes.parts import constant


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many paddings are concatenations now."""
    for node in list(model.graph):
        if _amounts(node) is not None:
            on_integers(model, node)
    paddings = [(node, amounts) for node in model.graph if (amounts := _amounts(node)) is not None]
    for node, amounts in paddings:
        _rewrite(model, node, amounts)
    return len(paddings)


def _amounts(node: ir.Node) -> list[tuple[int, int]] | None:
    """What a circular Pad adds before and behind each axis; None for anything else."""
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "wrap":
        return None
    amounts, axes = node.inputs[1], node.inputs[3] if len(node.inputs) > 3 else None
    if axes is not None or amounts is None or amounts.const_value is None:
        return None
    begins, ends = amounts.const_value.numpy().reshape(2, -1).tolist()
    return list(zip(begins, ends, strict=True)) if min(*begins, *ends) >= 0 else None


def _rewrite(model: ir.Model, node: ir.Node, amounts: list[tuple[int, int]]) -> None:
    result, value = node.outputs[0], node.inputs[0]
    assert value is not None
    made: list[ir.Node] = []
    for axis, (begin, end) in enumerate(amounts):
        name = f"{result.name}/{axis}"
        parts = [value]
        if begin:
            parts.insert(0, _slice(model, f"{name}/end", value, (-begin, sys.maxsize, axis), made))
        if end:
            parts.append(_slice(model, f"{name}/beginning", value, (0, end, axis), made))
        if len(parts) > 1:
            value = _add(ir.node("Concat", parts, {"axis": axis}, name=name), value, made)
    model.graph.insert_before(node, made)
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], [], [result], [value])


def _slice(
    model: ir.Model, name: str, value: ir.Value, span: tuple[int, int, int], made: list[ir.Node]
) -> ir.Value:  # fmt: skip
    """A part of ``value``, from and to where along which axis."""
    told = [constant(model, f"{name}/{index}", np.array([number])) for index, number in enumerate(span)]
    return _add(ir.node("Slice", [value, *told], name=name), value, made)


def _add(node: ir.Node, like: ir.Value, made: list[ir.Node]) -> ir.Value:
    """The result of a node, of the type of ``like``, which joins those that are ``made``."""
    made.append(node)
    result = node.outputs[0]
    result.name, result.dtype = node.name, like.dtype
    return result
