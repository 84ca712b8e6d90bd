"""Complex numbers, of which ONNX has none: torch writes them as real ones with an axis of two behind the others.

torch has forms for sums, products and Fourier transforms of these, and none for zeros, paddings and parts that are
written into a whole, as Fourier neural operators (arXiv 2010.08895) make their spectra. What moves numbers moves their
parts alike, with the last axis as it is:

    move(z) = view_as_complex(move(view_as_real(z)))

A part that is written into a whole has no gradient in complex numbers either, and ranges that are weighed by gradients
need one: this is spelled so in the float graph already, where it is still there.

An inverse transform of fewer frequencies than it wants is padded with zeros first. Products of matrices have a form
that stores each weight twice. They are written as four of the parts: (a + bi)(c + di) = ac - bd + (ad + bc)i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from qtool.graphs.edits import call_before

aten = torch.ops.aten

_SIZED: dict[Any, int] = {
    aten.zeros.default: 0, aten.new_zeros.default: 1, aten.expand.default: 1, aten.reshape.default: 1,
}  # fmt: skip
"""Where an operator is told the size of its result."""
_ALONG: dict[Any, tuple[int, ...]] = {
    aten.slice_scatter.default: (2,), aten.select_scatter.default: (2,), aten.select.int: (1,),
    aten.unsqueeze.default: (1,), aten.index_select.default: (1,), aten.flatten.using_ints: (1, 2),
    aten.constant_pad_nd.default: (), aten.pad.default: (), aten.zeros_like.default: (),
}  # fmt: skip
"""Where an operator is told axes, which count from the last one where they are negative."""
_DEFAULTS: dict[Any, tuple[int, ...]] = {
    aten.slice_scatter.default: (0,), aten.flatten.using_ints: (0, -1),
}  # fmt: skip
_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def spell_scatters(graph_module: GraphModule) -> None:
    """Writes what writes complex numbers into others as what does so with their parts, in place."""
    found = [node for node in graph_module.graph.nodes if node.target in _SCATTERS and _is_complex(node)]
    for node in found:
        _move_parts(node)
    if found:
        graph_module.recompile()


def spell_parts(graph: Graph) -> None:
    """Writes moves and matrix products of complex numbers as those of their parts, in place."""
    for node in list(graph.find_nodes(op="call_function", target=aten.fft_irfft.default)):
        _pad_frequencies(node)
    for node in list(graph.nodes):
        if node.target in _SIZED or node.target in _ALONG:
            if _is_complex(node):
                _move_parts(node)
        elif node.target in _PRODUCTS and node.meta["val"].is_complex():
            _multiply_parts(node)


def _is_complex(node: Node) -> bool:
    """Whether what a node moves is complex, and so what it gives."""
    return all(value.meta["val"].is_complex() for value in (node, *_moved(node)))


def _moved(node: Node) -> list[Node]:
    """The values that are moved, beside sizes and places."""
    count = 2 if node.target in _SCATTERS else 1
    return [value for value in node.args[:count] if isinstance(value, Node)]


def _move_parts(node: Node) -> None:
    args: list[Any] = list(node.args)
    if node.target in _SIZED:
        args[_SIZED[node.target]] = [*args[_SIZED[node.target]], 2]
    for place, default in zip(_ALONG.get(node.target, ()), _DEFAULTS.get(node.target, (0, 0)), strict=False):
        args[place:] = args[place:] or [default]
        rank = args[0].meta["val"].dim() + (node.target is aten.unsqueeze.default)
        args[place] = args[place] % rank
    if node.target in (aten.constant_pad_nd.default, aten.pad.default):
        args[1] = [0, 0, *args[1]]
    for place, value in enumerate(_moved(node)):
        args[place] = call_before(node, aten.view_as_real.default, value)
    node.args = tuple(args)
    if (kind := node.kwargs.get("dtype")) is not None:
        node.kwargs = {**node.kwargs, "dtype": kind.to_real()}  # type: ignore[union-attr]
    whole = node.meta["val"]
    node.meta["val"] = torch.view_as_real(whole.contiguous())
    made = call_before(node.next, aten.view_as_complex.default, node)
    made.meta = {**node.meta, "val": whole}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _multiply_parts(node: Node) -> None:
    (a, b), (c, d) = (_parts(node, value) for value in node.args)

    def product(left: Node, right: Node) -> Node:
        return call_before(node, node.target, left, right)

    real = call_before(node, aten.sub.Tensor, product(a, c), product(b, d))
    imaginary = call_before(node, aten.add.Tensor, product(a, d), product(b, c))
    pair = call_before(node, aten.stack.default, [real, imaginary], -1)
    node.replace_all_uses_with(call_before(node, aten.view_as_complex.default, pair))
    node.graph.erase_node(node)


def _parts(node: Node, value: Any) -> tuple[Node, Node]:
    pair = call_before(node, aten.view_as_real.default, value)
    return call_before(node, aten.select.int, pair, -1, 0), call_before(node, aten.select.int, pair, -1, 1)


def _pad_frequencies(node: Node) -> None:
    """Gives an inverse transform of real numbers all the frequencies that so many of them have."""
    source, count, axis = (*node.args, *(None, -1)[len(node.args) - 1 :])[:3]
    assert isinstance(source, Node)
    assert isinstance(axis, int)
    rank = source.meta["val"].dim()
    present = source.meta["val"].shape[axis]
    if isinstance(count, int) and isinstance(present, int) and present < count // 2 + 1:
        amounts = [0, 0] * (rank - 1 - axis % rank) + [0, count // 2 + 1 - present]
        node.update_arg(0, call_before(node, aten.constant_pad_nd.default, source, amounts))
