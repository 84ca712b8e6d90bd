"""Bags of as many words each: a lookup of all of them, and their sum, mean or maximum.

``EmbeddingBag`` over a matrix of indices flattens it and marks where each bag begins. ONNX has no such operator: torch
exports a loop over the bags, in which nothing is an integer and which a half-precision converter does not reach into.
``embedding`` and a reduction are the same numbers, and the table can be bytes.

    sum: Σ_j w_j E[i_j],    mean: Σ_j m_j E[i_j] / max(Σ_j m_j, 1),    max: max_j E[i_j]

where w are weights that are given for a sum, and m is 0 where an index stands for padding and else 1.

Left out on purpose: bags of different sizes, whose beginnings are an input, and a maximum that passes over padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2


def spell_bag(node: Node) -> None:
    """Writes ``embedding_bag`` over a matrix of indices as a lookup and what is made of it, in place."""
    weight, flat, offsets, _, mode, _, factors, _, padding = _arguments(node)
    ids, each = _matrix(flat), None if factors is None else _matrix(factors)
    results = [user for user in node.users if user.users]
    parts_known = ids is not None and (factors is None) == (each is None)
    if not parts_known or not _begins_every(offsets, ids) or any(user.args[1] != 0 for user in results):
        return
    if (mode == _MAX and padding is not None) or (factors is not None and mode != _SUM):
        return
    with node.graph.inserting_before(node):
        values = _add(node, aten.embedding.default, weight, ids)
        factors = _mask(node, ids, padding, each)
        if factors is not None:
            values = _add(node, aten.mul.Tensor, values, _add(node, aten.unsqueeze.default, factors, -1))
        bag = _reduced(node, values, mode, factors)
    for user in results:
        user.replace_all_uses_with(bag)
        node.graph.erase_node(user)


def _arguments(node: Node) -> tuple[Any, ...]:
    """The operator's arguments, those that are left out as its schema has them."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    return tuple(given.get(argument.name, argument.default_value) for argument in schema.arguments)


def _matrix(flat: Any) -> Node | None:
    """What was flattened, where that has a fixed number of columns."""
    source = flat.args[0] if isinstance(flat, Node) and flat.target is aten.reshape.default else None
    if not isinstance(source, Node) or flat.args[1] != [-1]:
        return None
    shape = source.meta["val"].shape
    return source if len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 0 else None


def _begins_every(offsets: Any, ids: Node | None) -> bool:
    """Whether bags begin at each row of a matrix of indices."""
    if ids is None or not isinstance(offsets, Node) or offsets.target is not aten.arange.start_step:
        return False
    first, _, step = (*offsets.args, 1)[:3]
    rows, columns = ids.meta["val"].shape
    return bool(first == 0 and step == columns and offsets.meta["val"].shape[0] == rows)


def _mask(node: Node, ids: Node | None, padding: Any, factors: Node | None) -> Node | None:
    """What each word counts: its weight, and nothing where it is padding; None where all count alike."""
    if padding is None or padding < 0:
        return factors
    counts = _add(node, aten.to.dtype, _add(node, aten.ne.Scalar, ids, padding), torch.float32)
    return counts if factors is None else _add(node, aten.mul.Tensor, factors, counts)


def _reduced(node: Node, values: Node, mode: int, factors: Node | None) -> Node:
    """The sum, mean or maximum over the words of each bag; one word is itself."""
    if values.meta["val"].shape[1] == 1 and factors is None:
        return _add(node, aten.select.int, values, 1, 0)
    if mode == _MAX:
        return _add(node, aten.amax.default, values, [1])
    if mode == _MEAN and factors is None:
        return _add(node, aten.mean.dim, values, [1])
    total = _add(node, aten.sum.dim_IntList, values, [1])
    if mode == _SUM or factors is None:
        return total
    count = _add(node, aten.clamp_min.default, _add(node, aten.sum.dim_IntList, factors, [1], True), 1)
    return _add(node, aten.div.Tensor, total, count)


def _add(node: Node, target: Any, *arguments: Any) -> Node:
    """A new operator with the meaning of ``node``'s place, and what is known of its value."""
    made = node.graph.call_function(target, arguments)
    known = (value.meta["val"] if isinstance(value, Node) else value for value in arguments)
    made.meta = {**node.meta, "val": target(*known)}
    return made
