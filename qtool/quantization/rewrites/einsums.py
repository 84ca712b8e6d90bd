"""Sums of products in Einstein's notation, written as what runtimes have kernels for: layers and matrix products.

An ``einsum`` with a stored tensor is a linear layer over the letters that are summed (XLNet's projections,
``ibh,hnd->ibnd``), and one of two activations a matrix product for each index of the letters that stay in both
(attention, ``bhid,bhjd->bhij``). The letters are brought into that order and back, and those of a layer that stand for
one axis of it are joined. An ``einsum`` of one tensor only turns it. Complex tensors, of which no layer is (a Fourier
neural operator's ``bixy,ioxy->boxy``), are multiplied as matrices, stored or not: ONNX has a form for these alone.

Left as it is: letters that are summed in one tensor alone, stand twice in it or are repeated, dots, three tensors and
more, a stored tensor with letters that stay in both, and products of activations with several letters at one place (but
for rows of one matrix).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean, store_before
from qtool.graphs.operators import aten
from qtool.graphs.shapes import same_sizes


@dataclass(frozen=True)
class _Letters:
    """Those of both tensors that stay, those that are summed, and those of one tensor alone."""

    both: str
    summed: str
    left: str
    right: str


def write_einsums(graph_module: GraphModule) -> int:
    """Rewrites in place what can be; returns how many."""
    changed = 0
    for node in list(graph_module.graph.find_nodes(op="call_function", target=aten.einsum.default)):
        made = _written(graph_module, node)
        if made is not None:
            made.meta = {**node.meta, "val": node.meta["val"]}
            node.replace_all_uses_with(made)
            graph_module.graph.erase_node(node)
            changed += 1
    if changed:
        clean(graph_module)
    return changed


def _written(graph_module: GraphModule, node: Node) -> Node | None:
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    read, arrow, result = equation.partition("->")
    terms = read.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in (*terms, result)):
        return None
    if len(terms) == 1 and sorted(terms[0]) == sorted(result):
        return _turned(node, operands[0], terms[0], result)
    if len(terms) != 2:
        return None
    if _is_stored(operands[0]):
        terms, operands = terms[::-1], operands[::-1]
    letters = _sorted(terms[0], terms[1], result)
    if letters is None or _is_stored(operands[0]) or not _have_one_size(operands, terms):
        return None
    if not _is_stored(operands[1]) or node.meta["val"].is_complex():
        return _product(node, operands, terms, letters, result)
    if letters.both or not (letters.left and letters.right):
        return None
    return _layer(graph_module, node, operands, terms, letters, result)


def _is_stored(value: Node) -> bool:
    return value.op == "get_attr"


def _have_one_size(operands: list[Node], terms: list[str]) -> bool:
    """Whether each letter stands for axes of one size, known or not: none of 1 is repeated for another."""
    sizes = [dict(zip(term, value.meta["val"].shape, strict=True)) for term, value in zip(terms, operands, strict=True)]
    return all(same_sizes([sizes[0][letter]], [sizes[1][letter]]) for letter in sizes[0].keys() & sizes[1].keys())


def _sorted(left: str, right: str, result: str) -> _Letters | None:
    """What becomes of each letter; None where one is summed in one tensor alone."""
    shared = set(left) & set(right)
    found = _Letters(
        "".join(c for c in result if c in shared), "".join(c for c in left if c in shared and c not in result),
        "".join(c for c in left if c not in shared), "".join(c for c in right if c not in shared),
    )  # fmt: skip
    return found if set(found.left + found.right) <= set(result) and found.summed else None


def _layer(
    graph_module: GraphModule, node: Node, operands: list[Node], terms: list[str], letters: _Letters, result: str
) -> Node:
    source, stored = operands
    weight = operator.attrgetter(str(stored.target))(graph_module).detach()
    turned = weight.permute([terms[1].index(c) for c in letters.right + letters.summed])
    sizes = list(turned.shape[: len(letters.right)])
    matrix = turned.reshape(math.prod(sizes), -1).contiguous()
    matrix_node = store_before(graph_module, node, f"{node.name}_weight", matrix, like=str(stored.target))
    rows = _turned(node, source, terms[0], letters.left + letters.summed)
    if len(letters.summed) > 1:
        rows = call_before(node, aten.flatten.using_ints, rows, len(letters.left))
    made = call_before(node, aten.linear.default, rows, matrix_node)
    if len(sizes) != 1:
        made = call_before(node, aten.unflatten.int, made, -1, sizes)
    return _turned(node, made, letters.left + letters.right, result)


def _product(node: Node, operands: list[Node], terms: list[str], letters: _Letters, result: str) -> Node | None:
    axes = 1 if letters.both else max(len(letters.left), 1)  # rows of any axes, where the right is one matrix
    if [len(group) for group in (letters.summed, letters.left, letters.right)] != [1, axes, 1]:
        return None
    rows = _turned(node, operands[0], terms[0], letters.both + letters.left + letters.summed)
    columns = _turned(node, operands[1], terms[1], letters.both + letters.summed + letters.right)
    made = call_before(node, aten.matmul.default, rows, columns)
    return _turned(node, made, letters.both + letters.left + letters.right, result)


def _turned(node: Node, source: Node, before: str, after: str) -> Node:
    order = [before.index(letter) for letter in after]
    return source if before == after else call_before(node, aten.permute.default, source, order)
