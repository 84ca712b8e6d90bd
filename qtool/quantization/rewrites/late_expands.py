"""What stored tensors alone decide is computed once, not for each sample, and expanded over the batch behind.

    layer(query.expand(batch, -1, -1)) = layer(query).expand(batch, -1, -1)

Learned queries (attention pooling, DETR's decoder, Perceiver) are expanded as the model begins with them, so that the
layers that project them compute the same for every sample, and round it. Positions that are counted in a mask of ones
for each sample (DETR's sines, EdgeNeXt, XCiT) go through sums, sines and a layer likewise. Expanded behind, what these
give is a constant. Left as they are: results that are too large to store, and operators beyond the layers, norms, sums
and moves that such values go through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import CONVOLUTIONS, aten
from qtool.graphs.shapes import batch_symbols, same_sizes, symbols_of
from qtool.quantization.rewrites.constants import LARGEST_RESULT, constant_nodes
from qtool.quantization.rewrites.repeats import draws

_COPIES = (aten.contiguous.default, aten.clone.default, aten.to.dtype)
_FILLS = (aten.zeros.default, aten.ones.default, aten.full.default)
_ALONG = (
    aten.slice.Tensor, aten.cumsum.default, aten.cat.default, aten.unsqueeze.default, aten.flatten.using_ints,
)  # fmt: skip
_WORK = (aten.linear.default, aten.cumsum.default, *CONVOLUTIONS)


def expand_late(graph_module: GraphModule) -> int:
    """Moves expansions over the batch behind such layers, in place; returns behind how many."""
    constants, batches = constant_nodes(graph_module), batch_symbols(graph_module.graph)
    single, batch, layers = dict[Node, Node](), dict[Node, Node](), set[Node]()
    for node in list(graph_module.graph.nodes):
        read = next((source for source in node.all_input_nodes if source in single), None)
        if node.target is aten.expand.default and _repeats(node, constants, batches):
            source, sizes = node.args
            single[node], batch[node] = source, sizes[0]
        elif node.target in _FILLS and _fills_alike(node, batches):
            single[node], batch[node] = _filled_once(node), node.args[0][0]
        elif read is not None and _is_alike(node, single, constants):
            alone = call_before(node, node.target, *_of_one(node, single), **node.kwargs)
            single[node], batch[node] = alone, batch[read]
            if node.target in _WORK or not layers.isdisjoint(node.all_input_nodes):
                layers.add(node)
    for node in layers:
        if any(user not in layers for user in node.users):
            sizes = [batch[node], *[-1] * (node.meta["val"].dim() - 1)]
            expanded = call_before(node, aten.expand.default, single[node], sizes)
            node.replace_all_uses_with(expanded, delete_user_cb=lambda user: user not in layers)
    if single:
        clean(graph_module)
    return len(layers)


def _repeats(expand: Node, constants: set[Node], batches: set[Any]) -> bool:
    """Whether an expansion gives each sample of a batch the same stored numbers."""
    arguments: Any = expand.args
    source, sizes = arguments[:2]
    if source not in constants or not isinstance(sizes[0], Node) or len(sizes) != source.meta["val"].dim():
        return False
    before, after = source.meta["val"].shape, expand.meta["val"].shape
    return before[0] == 1 and symbols_of(after[0]) <= batches and same_sizes(before[1:], after[1:])


def _fills_alike(fill: Node, batches: set[Any]) -> bool:
    """Whether a tensor of one number has as many samples as the batch, and is else of known size."""
    arguments: Any = fill.args
    sizes, count = arguments[0], fill.meta["val"].shape[:1]
    known = all(isinstance(size, int) for size in sizes[1:])
    return known and isinstance(next(iter(sizes), 1), Node) and symbols_of(count[0]) <= batches


def _filled_once(fill: Node) -> Node:
    """Such a tensor for one sample."""
    arguments: Any = fill.args
    sizes = [1, *arguments[0][1:]]
    with fill.graph.inserting_before(fill):
        made = fill.graph.call_function(fill.target, (sizes, *arguments[1:]), fill.kwargs)  # type: ignore[arg-type]
    made.meta = {**fill.meta, "val": fill.meta["val"].new_empty(sizes)}
    return made


def _is_alike(node: Node, single: dict[Node, Node], constants: set[Node]) -> bool:
    """Whether an operator gives each sample the same, of what is the same for each and of stored tensors."""
    arguments: Any = node.args
    source, *others = arguments
    parts = source if isinstance(source, list | tuple) else [source]
    given = [other for other in node.all_input_nodes if other not in parts and other not in constants]
    if node.meta["val"][:1].numel() > LARGEST_RESULT or any(isinstance(value, Node) for value in node.kwargs.values()):
        return False
    if _is_by_number(node.target):
        rank = node.meta["val"].dim()
        shapes = [single.get(operand, operand).meta["val"].shape for operand in node.all_input_nodes]
        alone = [len(shape) < rank or shape[0] == 1 for shape in shapes]
        return all(alone) and all(operand in single or operand in constants for operand in node.all_input_nodes)
    if not all(part in single for part in parts):
        return False
    rank = parts[0].meta["val"].dim()
    if node.target is aten.reshape.default:
        kept = same_sizes(node.meta["val"].shape[:1], source.meta["val"].shape[:1])
        return kept and all(isinstance(size, int) for size in others[0][1:])
    if node.target in (aten.transpose.int, aten.permute.default):
        axes = others if node.target is aten.transpose.int else others[0][1:]
        return all(axis % rank for axis in axes)
    if node.target in _ALONG:
        axis = others[0] if others else 0
        return not given and axis % (rank + (node.target is aten.unsqueeze.default)) != 0
    own = {aten.linear.default: 1, aten.layer_norm.default: len(others[0]) if isinstance(others[0], list) else rank}
    own |= dict.fromkeys(CONVOLUTIONS, node.meta["val"].dim() - 1)
    return not given and node.target in own and own[node.target] < rank


def _is_by_number(operation: Any) -> bool:
    """Whether an operator computes each number from those in its place alone."""
    return operation in _COPIES or (torch.Tag.pointwise in getattr(operation, "tags", ()) and not draws(operation))


def _of_one(node: Node, single: dict[Node, Node]) -> tuple[Any, ...]:
    """An operator's arguments, of one sample."""
    arguments: Any = map_arg(node.args, lambda read: single.get(read, read))
    return (arguments[0], [1, *arguments[1][1:]]) if node.target is aten.reshape.default else arguments
