"""Choices by value in a file: which entries are greatest (``topk``, ``sort``, ``argmax``), as detectors choose queries.

Scores a rounding apart may stand the other way round in two correct evaluations, and then all that is read at the
chosen places differs. So where units are compared one by one, a choice is a border as a quantizer is: its readers are
fed the places that the torch graph chose, and of the file's own choice the scores are compared.
"""

from __future__ import annotations

import onnx
import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
PLACES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}
"""The ONNX operators that choose, and which of their outputs are places."""
CHOOSING = {
    aten.topk.default: "TopK", aten.sort.default: "TopK", aten.argsort.default: "TopK",
    aten.argmax.default: "ArgMax", aten.max.dim: "ArgMax", aten.argmin.default: "ArgMin", aten.min.dim: "ArgMin",
}  # fmt: skip

REDUCING = (aten.argmax.default, aten.argmin.default)


def choices(graph: GraphModule) -> list[Node]:
    """The nodes whose places are read, in graph order; one that chooses among values alone is none."""
    found = (node for node in graph.graph.nodes if node.target in CHOOSING)
    return [node for node in found if not _is_pair(node) or any(u.args[1] == 1 and u.users for u in node.users)]


def places_of(value: object) -> torch.Tensor:
    """The places in what a node of :func:`choices` gives: alone, or behind the values."""
    places = value[1] if isinstance(value, tuple) else value
    assert isinstance(places, torch.Tensor)
    return places


def scores_at(node: Node, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What a node of :func:`choices` has chosen: its ``scores`` at ``places`` of its axis, int64.

    In ascending order where the node promises none, as routers of experts ask for it.
    """
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dim = given.get("dim", None if node.target in REDUCING else -1)
    if dim is None:
        return scores.flatten()[places.flatten()]
    found = scores.gather(dim, places if places.ndim == scores.ndim else places.unsqueeze(dim))
    return found if given.get("sorted", True) else found.sort(dim).values


def choosing(model: onnx.ModelProto) -> list[tuple[str, str, str]]:
    """(operator, name of its scores, name of its places) of each operator of a file whose places are read."""
    read = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    nodes = (node for node in model.graph.node if len(node.output) > PLACES.get(node.op_type, 1 << 10))
    found = [(node.op_type, node.input[0], node.output[PLACES[node.op_type]]) for node in nodes]
    return [choice for choice in found if choice[2] in read]


def pairs(graph: GraphModule, model: onnx.ModelProto) -> dict[Node, tuple[str, str]]:
    """(scores, places) in the file for each choice of the graph; none where these are not the same choices in order.

    A file has one operator for two equal choices, and some choices are written otherwise there.
    """
    nodes, found = choices(graph), choosing(model)
    if [CHOOSING[node.target] for node in nodes] != [operator for operator, _, _ in found]:  # type: ignore[index]
        return {}
    return {node: (scores, places) for node, (_, scores, places) in zip(nodes, found, strict=True)}


def _is_pair(node: Node) -> bool:
    return node.target not in (aten.argsort.default, *REDUCING)
