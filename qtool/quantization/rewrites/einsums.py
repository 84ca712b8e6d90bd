"""Sums of products in Einstein's notation, written as what runtimes have kernels for: layers and matrix products.

An ``einsum`` with a stored tensor is a linear layer over the letters that are summed (XLNet's projections,
``ibh,hnd->ibnd``), and one of two activations a matrix product for each index of the letters that stay in both
(attention, ``bhid,bhjd->bhij``). The letters are brought into that order and back, and those of a layer that stand for
one axis of it are joined. An ``einsum`` of one tensor only turns it. Complex tensors, of which no layer is (a Fourier
neural operator's ``bixy,ioxy->boxy``), are multiplied as matrices, stored or not: ONNX has a form for these alone.

A stored tensor with letters that stay in both (the experts of a mixture, ``ebk,ekn->ebn``, be it written as ``bmm`` or
``matmul``) is a linear layer for each index of these, whose results are stacked. Of 192 × 384 weights and more, INT8
takes 0.3 to 0.9 times as long so as one product of floats (ONNX Runtime, one thread, 4 to 64 experts, 2 to 512 rows),
of 128 × 256 0.9 to 1.8 times, so that small ones stay whole, and very many, stored in bytes (``storage.py``); floats
take about as long either way. Of three factors, that activation whose letters are all in another's is multiplied with
this one first.

Left as it is: letters that are summed in one tensor alone, stand twice in it or are repeated, dots, other products of
three tensors and more, and products of activations with several letters at one place (but for rows of one matrix).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import string
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean, store_before
from qtool.graphs.operators import aten
from qtool.graphs.shapes import same_sizes
from qtool.quantization.targets.stored import PRODUCTS, is_stored, moved_from

MOST_LAYERS, LEAST_WEIGHTS = 64, 2**16
"""Into how many layers a product is parted at most, and how many weights each of them has at least."""
_Factors = tuple[list[Node], list[str], str]
"""What is multiplied, with its letters and the result's."""


@dataclass(frozen=True)
class _Letters:
    """Those of both tensors that stay, those that are summed, and those of one tensor alone."""

    both: str
    summed: str
    left: str
    right: str


def write_einsums(graph_module: GraphModule) -> int:
    """Rewrites in place what can be; returns how many."""
    writer, changed = _Writer(graph_module), 0
    for node in [node for node in graph_module.graph.nodes if node.target in (aten.einsum.default, *PRODUCTS)]:
        joined, made = _join_activations(node), writer.write(node)
        if made is not None:
            made.meta = {**node.meta, "val": node.meta["val"]}
            node.replace_all_uses_with(made)
            graph_module.graph.erase_node(node)
        changed += joined or made is not None
    if changed:
        clean(graph_module)
    return changed


@dataclass(frozen=True)
class _Stored:
    """Matrices of outputs × inputs of a stored tensor, one for each index of the letters that stay in both.

    ``outputs`` are the sizes that one axis of a matrix stands for, ``key`` what tells it from others.
    """

    matrices: Tensor
    outputs: list[int]
    path: str
    key: tuple[Any, ...]

    def at(self, index: int) -> _Stored:
        return dataclasses.replace(self, matrices=self.matrices[index], key=(*self.key, index))


class _Writer:
    """Writes products of one graph; what is stored of a tensor for one of them serves all."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._paths: dict[tuple[Any, ...], str] = {}

    def write(self, node: Node) -> Node | None:
        """What computes the same as ``node``, in front of it; None where it is to stay."""
        found = _read_sum(node) if node.target is aten.einsum.default else _read_product(node)
        if found is None:
            return None
        operands, terms, result = found
        if len(terms) == 1 and sorted(terms[0]) == sorted(result):
            return _turned(node, operands[0], terms[0], result)
        if len(terms) != 2:
            return None
        if is_stored(operands[0]):
            terms, operands = terms[::-1], operands[::-1]
        letters = _sorted(terms[0], terms[1], result)
        if letters is None or is_stored(operands[0]) or not _have_one_size(operands, terms):
            return None
        if not is_stored(operands[1]) or node.meta["val"].is_complex():
            return _product(node, operands, terms, letters, result)
        if not (letters.left and letters.right):
            return None
        stored = self._stored(operands[1], terms[1], letters)
        if letters.both and not _are_worth_layers(stored.matrices):
            return None
        return self._layers(node, operands[0], stored, terms[0], letters, result)

    def _stored(self, value: Node, term: str, letters: _Letters) -> _Stored:
        source, *moves = moved_from(value)
        path = str(source.target)
        weight = operator.attrgetter(path)(self._graph_module).detach()
        for move in moves:
            weight = move.target(weight, *move.args[1:])  # type: ignore[operator]
        order = [term.index(c) for c in letters.both + letters.right + letters.summed]
        turned, count = weight.permute(order), len(letters.both)
        outputs = list(turned.shape[count : count + len(letters.right)])
        matrices = turned.reshape(*turned.shape[:count], math.prod(outputs), -1)
        key = path, *((move.target, str(move.args[1:])) for move in moves), *order, len(outputs), count
        return _Stored(matrices, outputs, path, key)

    def _layers(self, node: Node, source: Node, stored: _Stored, term: str, letters: _Letters, result: str) -> Node:
        """A linear layer, or, for the first letter that stays in both, a stack of what this gives for each index."""
        if not letters.both:
            return self._layer(node, source, stored, term, letters, result)
        letter, axis = letters.both[0], result.index(letters.both[0])
        inner = dataclasses.replace(letters, both=letters.both[1:])
        parts = []
        for index in range(len(stored.matrices)):
            part = call_before(node, aten.select.int, source, term.index(letter), index)
            args = stored.at(index), term.replace(letter, ""), inner, result.replace(letter, "")
            parts.append(call_before(node, aten.unsqueeze.default, self._layers(node, part, *args), axis))
        return call_before(node, aten.cat.default, parts, axis)

    def _layer(self, node: Node, source: Node, stored: _Stored, term: str, letters: _Letters, result: str) -> Node:
        rows = _turned(node, source, term, letters.left + letters.summed)
        if len(letters.summed) > 1:
            rows = call_before(node, aten.flatten.using_ints, rows, len(letters.left))
        made = call_before(node, aten.linear.default, rows, self._weight(node, stored))
        if len(stored.outputs) != 1:
            made = call_before(node, aten.unflatten.int, made, -1, stored.outputs)
        return _turned(node, made, letters.left + letters.right, result)

    def _weight(self, node: Node, stored: _Stored) -> Node:
        path = self._paths.setdefault(stored.key, f"{node.name}_weight{len(self._paths) or ''}")
        return store_before(self._graph_module, node, path, stored.matrices.contiguous(), like=stored.path)


def _read_sum(node: Node) -> _Factors | None:
    """What is multiplied in an ``einsum``; None where letters are repeated or not told."""
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    read, arrow, result = equation.partition("->")
    terms = read.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in (*terms, result)):
        return None
    return operands, terms, result


def _read_product(node: Node) -> _Factors | None:
    """A product with a stored batch of matrices, in letters; None where it is none, or of vectors."""
    operands: list[Any] = list(node.args)
    ranks = [value.meta["val"].dim() for value in operands]
    stored = [is_stored(value) and rank > 2 for value, rank in zip(operands, ranks, strict=True)]
    if sum(stored) != 1 or min(ranks) < 2 or not node.meta["val"].is_floating_point():
        return None
    batch = string.ascii_lowercase[: max(ranks) - 2]
    left, right = (batch[len(batch) - (rank - 2) :] for rank in ranks)
    return operands, [f"{left}XY", f"{right}YZ"], f"{batch}XZ"


def _are_worth_layers(matrices: Tensor) -> bool:
    """Whether layers of such matrices are faster than one product of floats."""
    count, (outputs, inputs) = math.prod(matrices.shape[:-2]), matrices.shape[-2:]
    return count <= MOST_LAYERS and outputs * inputs >= LEAST_WEIGHTS


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


def _join_activations(node: Node) -> bool:
    """Makes two factors of three, in place, where the letters of one activation are all in another's."""
    found = _read_sum(node) if node.target is aten.einsum.default else None
    if found is None or len(found[1]) != 3:
        return False
    operands, terms, result = found
    for large, small in itertools.permutations([place for place in range(3) if not is_stored(operands[place])], 2):
        pair, letters = [operands[large], operands[small]], [terms[large], terms[small]]
        if set(letters[1]) <= set(letters[0]) and _have_one_size(pair, letters):
            factor = _turned(node, pair[1], letters[1], "".join(c for c in letters[0] if c in letters[1]))
            for axis in [axis for axis, letter in enumerate(letters[0]) if letter not in letters[1]]:
                factor = call_before(node, aten.unsqueeze.default, factor, axis)
            product, rest = call_before(node, aten.mul.Tensor, pair[0], factor), 3 - large - small
            node.args = (f"{letters[0]},{terms[rest]}->{result}", [product, operands[rest]])
            return True
    return False
