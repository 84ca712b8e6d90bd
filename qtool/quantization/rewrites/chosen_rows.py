"""Parts of a stored tensor that the data chooses, written as rows of a table, which can be bytes.

A mixture of experts stores the weights of all in one tensor, and indexes it by those that ``topk`` chose for each
token. In ``embedding``'s words, for a tensor of experts × outputs × inputs,

    W[e] = rows e · outputs … e · outputs + outputs − 1 of the table of (experts · outputs) × inputs

so that each output of each expert has a scale of its own. Left as it is: what other indices choose, which may count
from the end, and a tensor that something else reads as well.
"""

from __future__ import annotations

import math
import operator

from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean, set_parameter
from qtool.graphs.operators import aten

_CHOICES = (aten.argmax.default, aten.argmin.default, aten.argsort.default)
_PAIRS = (aten.topk.default, aten.max.dim, aten.min.dim)
_MOVES = (
    aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor,
    aten.select.int, aten.transpose.int, aten.permute.default, aten.expand.default, aten.to.dtype,
)  # fmt: skip


def write_chosen_rows(graph_module: GraphModule) -> int:
    """Rewrites in place each indexing of a stored tensor's first axis by what the data chose; returns how many."""
    readers: dict[str, list[Node]] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), []).extend(node.users)
    tables = {path: nodes for path, nodes in readers.items() if nodes and all(_chooses(n, path) for n in nodes)}
    for path, nodes in tables.items():
        stored = operator.attrgetter(path)(graph_module).detach()
        if stored.dim() > 2:
            set_parameter(graph_module, path, stored.flatten(0, -2), like=path)
        for node in nodes:
            _write(node, list(stored.shape))
    if tables:
        clean(graph_module)
    return sum(map(len, tables.values()))


def _chooses(node: Node, path: str) -> bool:
    table, chosen = _parts(node) or (None, None)
    if table is None or table.target != path:
        return False
    value = table.meta["val"]
    return value.is_floating_point() and value.dim() > 1 and _is_chosen(chosen)


def _parts(node: Node) -> tuple[Node, Node] | None:
    """What is indexed and by what, where one tensor of indices says all; None elsewhere."""
    if node.target is not aten.index.Tensor:
        return None
    (table, indices), known = node.args, (list, tuple)
    one = isinstance(indices, known) and len(indices) == 1 and isinstance(indices[0], Node)
    return (table, indices[0]) if one and isinstance(table, Node) else None  # type: ignore[index, return-value]


def _is_chosen(value: object) -> bool:
    """Whether indices are places that an operator found, which count from the beginning."""
    while isinstance(value, Node) and value.target in _MOVES:
        value = value.args[0]
    if isinstance(value, Node) and value.target is operator.getitem and value.args[1] == 1:
        pair = value.args[0]
        return isinstance(pair, Node) and pair.target in _PAIRS
    return isinstance(value, Node) and value.target in _CHOICES


def _write(node: Node, sizes: list[int]) -> None:
    parts = _parts(node)
    assert parts is not None
    (table, rows), inner, width = parts, sizes[1:-1], sizes[-1]
    count = math.prod(inner)
    table.meta["val"] = table.meta["val"].new_empty((sizes[0] * count, width))
    if inner:
        known = rows.meta["val"]
        with node.graph.inserting_before(node):
            each = node.graph.call_function(aten.arange.default, (count,), {"device": known.device})
        each.meta = {**node.meta, "val": known.new_empty((count,))}
        first = call_before(node, aten.mul.Tensor, call_before(node, aten.unsqueeze.default, rows, -1), count)
        rows = call_before(node, aten.add.Tensor, first, each)
    made = call_before(node, aten.embedding.default, table, rows)
    if len(inner) > 1:
        made = call_before(node, aten.unflatten.int, made, -2, inner)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
