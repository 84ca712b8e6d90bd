"""What stored tensors alone decide is computed once, not for each sample, and expanded over the batch behind.

    layer(query.expand(batch, -1, -1)) = layer(query).expand(batch, -1, -1)

Learned queries (attention pooling, DETR's decoder, Perceiver) are expanded as the model begins with them, so that the
layers that project them compute the same for every sample, and round it. Expanded behind, what these give is a
constant. Left as they are: results that are too large to store, and operators beyond the layers, norms, sums and moves
that such queries go through.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import aten
from qtool.graphs.shapes import batch_symbols, same_sizes, symbols_of
from qtool.quantization.rewrites.constants import LARGEST_RESULT, constant_nodes

_BY_NUMBER = (
    aten.add.Tensor, aten.mul.Tensor, aten.relu.default, aten.gelu.default, aten.silu.default, aten.contiguous.default,
    aten.clone.default,
)  # fmt: skip


def expand_late(graph_module: GraphModule) -> int:
    """Moves expansions over the batch behind such layers, in place; returns behind how many."""
    constants, batches = constant_nodes(graph_module), batch_symbols(graph_module.graph)
    single, batch, layers = dict[Node, Node](), dict[Node, Node](), set[Node]()
    for node in list(graph_module.graph.nodes):
        read = next((source for source in node.all_input_nodes if source in single), None)
        if node.target is aten.expand.default and _repeats(node, constants, batches):
            source, sizes = node.args
            single[node], batch[node] = source, sizes[0]
        elif read is not None and _is_alike(node, single, constants):
            single[node], batch[node] = call_before(node, node.target, *_of_one(node, single)), batch[read]
            if node.target is aten.linear.default or not layers.isdisjoint(node.all_input_nodes):
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


def _is_alike(node: Node, single: dict[Node, Node], constants: set[Node]) -> bool:
    """Whether an operator gives each sample the same, of what is the same for each and of stored tensors."""
    arguments: Any = node.args
    source, *others = arguments
    given = [other for other in node.all_input_nodes if other is not source and other not in constants]
    if node.kwargs or node.meta["val"][:1].numel() > LARGEST_RESULT or not isinstance(source, Node):
        return False
    if node.target in _BY_NUMBER:
        rank = node.meta["val"].dim()
        shapes = [single.get(operand, operand).meta["val"].shape for operand in node.all_input_nodes]
        alone = [len(shape) < rank or shape[0] == 1 for shape in shapes]
        return all(alone) and all(operand in single for operand in (*given, *{source} - constants))
    if source not in single:
        return False
    rank = source.meta["val"].dim()
    if node.target is aten.reshape.default:
        kept = same_sizes(node.meta["val"].shape[:1], source.meta["val"].shape[:1])
        return kept and all(isinstance(size, int) for size in others[0][1:])
    if node.target in (aten.transpose.int, aten.permute.default):
        axes = others if node.target is aten.transpose.int else others[0][1:]
        return all(axis % rank for axis in axes)
    own = {aten.linear.default: 1, aten.layer_norm.default: len(others[0]) if isinstance(others[0], list) else rank}
    return not given and node.target in own and own[node.target] < rank


def _of_one(node: Node, single: dict[Node, Node]) -> tuple[Any, ...]:
    """An operator's arguments, of one sample."""
    arguments: Any = map_arg(node.args, lambda read: single.get(read, read))
    return (arguments[0], [1, *arguments[1][1:]]) if node.target is aten.reshape.default else arguments
