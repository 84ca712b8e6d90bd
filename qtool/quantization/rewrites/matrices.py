"""Linear layers over more than two dimensions as matrix products of two.

A runtime's integer kernel for a linear layer with a bias (Gemm) takes matrices; over a batch of sequences, the product
and the bias are two operators and the second runs in float. So ``linear(x)`` with x of N × T × C becomes a linear
layer over NT × C between two reshapes, which cost nothing. An activation behind it moves in front of the second
reshape, where it fuses. The dimension whose size is not fixed, the batch, may stand anywhere: attention over
T × N × C is written so. Where the length of sequences is open as well, the second reshape reads it from the input.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE
from qtool.graphs.operators import aten
from qtool.quantization.rewrites.repeats import merge_repeats
from qtool.quantization.targets import RELU_LIKE


def flatten_linears(graph_module: GraphModule) -> int:
    """Rewrites in place each linear layer; returns how many."""
    linears = [node for node in graph_module.graph.nodes if node.target is aten.linear.default]
    changed = [node for node in linears if node.meta["val"].dim() != 2 and _flatten(node)]
    graph_module.graph.eliminate_dead_code()
    merge_repeats(graph_module)  # several layers may flatten one input
    graph_module.graph.lint()
    graph_module.recompile()
    return len(changed)


def flatten_quantized(graph_module: GraphModule) -> None:
    """Flattens the linear layers of a graph that has its quantizers already."""
    if flatten_linears(graph_module):
        _quantize_beside_moves(graph_module)


def _flatten(node: Node) -> bool:
    source, weight, value = *node.args[:2], node.meta["val"]
    assert isinstance(source, Node)
    assert isinstance(weight, Node)
    if value.dim() < 3:
        return False
    sizes = _sizes(node, source)
    follower = next(iter(node.users)) if len(node.users) == 1 else None
    last = follower if follower is not None and follower.target in RELU_LIKE and follower.args[0] is node else node
    rows = math.prod(value.shape[:-1])
    flat_in = source.meta["val"].new_empty([rows, _width(source, weight)])
    flat_out = value.new_empty([rows, value.shape[-1]])
    with node.graph.inserting_before(node):
        node.update_arg(0, _reshape(node, source, [-1, flat_in.shape[1]], flat_in))
    with node.graph.inserting_after(last):
        restored = _reshape(last, last, sizes, value)
    last.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    for flattened in {node, last}:
        flattened.meta = {**flattened.meta, "val": flat_out}
    return True


def _width(source: Node, weight: Node) -> Any:
    """The last size of a layer's input: as the weight has it where it was computed from open ones."""
    given = source.meta["val"].shape[-1]
    return given if isinstance(given, int) or "val" not in weight.meta else weight.meta["val"].shape[-1]


def _sizes(node: Node, source: Node) -> list[Any]:
    """The shape of a layer's result: −1 for the first size that is open, and what the input says for any other."""
    sizes: list[Any] = list(node.meta["val"].shape)
    for axis in [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]:
        if -1 not in sizes:
            sizes[axis] = -1
            continue
        with node.graph.inserting_before(node):
            size = node.graph.call_function(aten.sym_size.int, (source, axis))
        size.meta["val"], sizes[axis] = sizes[axis], size
    return sizes


def _reshape(near: Node, source: Node, shape: list[Any], value: Any) -> Node:
    node = near.graph.call_function(aten.reshape.default, (source, shape))
    node.meta = {key: near.meta[key] for key in ("nn_module_stack", "owner") if key in near.meta} | {"val": value}
    return node


def _quantize_beside_moves(graph: GraphModule) -> None:
    """Rounds on both sides of each reshape that a layer got, which changes nothing, as pt2e does: layers fuse so."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.reshape.default):
        source, users = node.args[0], list(node.users)
        if source.target in DEQUANTIZE and all(user.target is aten.linear.default for user in users):
            _rounded(node, (source.args[0], source))
        elif len(users) == len(source.users) == 1 and users[0].target in QUANTIZE and source.target not in DEQUANTIZE:
            _rounded(source, (users[0], next(iter(users[0].users))))
    graph.recompile()


def _rounded(node: Node, like: tuple[Node, ...]) -> None:
    """Puts the same two operators, a quantizer and its inverse, behind a node as they are elsewhere."""
    readers, last = list(node.users), node
    for operator in like:
        assert callable(operator.target)
        with last.graph.inserting_after(last):
            made = last.graph.call_function(operator.target, (last, *operator.args[1:]), dict(operator.kwargs))
        made.meta = {key: value for key, value in node.meta.items() if key != "unit"}
        last = made
    for reader in readers:
        reader.replace_input_with(node, last)
