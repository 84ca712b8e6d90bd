"""What a graph computes from stored tensors alone, and storing the result instead.

A weight that the model normalises itself, one that is cut out of a packed tensor (attention between two sequences),
positions cut to the length of the input and looked up: such values are the same for every input. torch's exporter
computes some of them as it writes the file; done before placement, the plan, the gates and the file mean the same
tensors, and a weight is a weight however the model spells it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE
from qtool.forward import passes_told
from qtool.graphs.edits import drop_unused, parameter, set_parameter
from qtool.graphs.operators import aten
from qtool.quantization.rewrites.repeats import draws

LARGEST_RESULT, LARGEST_SOURCE = 512 * 512, 8192
"""How many values torch's exporter stores of what it computes beforehand, and from tensors of how many."""

Wanted = Callable[[Node], bool]
_PARTS = (
    aten.slice.Tensor, aten.select.int, aten.reshape.default, aten.transpose.int, aten.permute.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip


def constant_nodes(graph_module: GraphModule) -> set[Node]:
    """Stored tensors, tensors that are counted out (``arange``), and everything that is computed from nothing else."""
    found: set[Node] = set()
    for node in graph_module.graph.nodes:
        computed = node.op == "call_function" and not draws(node.target) and (node.all_input_nodes or _counts(node))
        if node.op == "get_attr" or (computed and all(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _counts(node: Node) -> bool:
    """Whether an operator without inputs gives a tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def constant_values(graph_module: GraphModule, nodes: Iterable[Node]) -> dict[Node, Any]:
    """What these constant nodes come to, and all that they are computed from."""
    needed, values = {source for node in nodes for source in _sources(node)}, dict[Node, Any]()
    for node in graph_module.graph.nodes:
        if node in needed:
            values[node] = _evaluate(graph_module, node, values)
    return values


def fold_quantized(graph_module: GraphModule) -> None:
    """Replaces each quantized constant by the integers it comes to, in place."""
    _fold(graph_module, lambda node: node.target in QUANTIZE)


def fold_computed(graph_module: GraphModule, *, train: bool = False) -> None:
    """Stores each tensor that is computed from constants, where the file takes no more bytes then; in place.

    A graph that is to ``train`` has parts of a parameter stored alone, which train as parameters of their own.
    """
    constants = constant_nodes(graph_module)
    ends = [node for node in graph_module.graph.nodes if node in constants and _ends(node, constants)]
    ends = [node for node in ends if not train or _is_part(node)]
    wanted = {node for group in _sharing(ends) if _bytes(group) <= _bytes(_spared(group)) for node in group}
    if not train:
        wanted |= {node for node in ends if _is_stored_anyway(node)}
    _fold(graph_module, wanted.__contains__)


def _fold(graph_module: GraphModule, wanted: Wanted) -> None:
    """Stores the value of each constant call that is ``wanted``; what it was made of is dropped unless still read."""
    folded = {node for node in constant_nodes(graph_module) if node.op == "call_function" and wanted(node)}
    values = constant_values(graph_module, folded)
    for node in list(graph_module.graph.nodes):
        if node in folded and isinstance(values[node], Tensor):
            _store(graph_module, node, values[node])
    if folded:
        graph_module.graph.eliminate_dead_code()
        drop_unused(graph_module)
        graph_module.recompile()


def _store(graph_module: GraphModule, node: Node, value: Tensor) -> None:
    path = f"{node.name}_folded"
    part_of = str(_stored(node)[0].target) if _is_part(node) else None
    set_parameter(graph_module, path, value.clone(), like=part_of)
    with graph_module.graph.inserting_before(node):
        stored = graph_module.graph.get_attr(path)
    stored.meta["val"] = node.meta.get("val", value)
    node.replace_all_uses_with(stored)


def _ends(node: Node, constants: set[Node]) -> bool:
    """Whether ``node`` is the last constant call of its line, and no quantizer took part in it."""
    quantizers = (*QUANTIZE, *DEQUANTIZE)
    return (
        node.op == "call_function"
        and not all(user in constants for user in node.users)
        and not any(source.target in quantizers for source in _sources(node))
    )


def _is_part(node: Node) -> bool:
    """Whether ``node`` is some of the numbers of one stored tensor."""
    sources = _sources(node)
    return len(_stored(node)) == 1 and all(source.op == "get_attr" or source.target in _PARTS for source in sources)


def _is_stored_anyway(node: Node) -> bool:
    """Whether the exporter would store what ``node`` comes to."""
    return _values(node) <= LARGEST_RESULT and all(_values(source) <= LARGEST_SOURCE for source in _stored(node))


def _sharing(ends: Iterable[Node]) -> list[list[Node]]:
    """The nodes in groups: those that are computed from one stored tensor, however indirectly, are together."""
    groups: dict[Node, list[Node]] = {}
    for node in ends:
        group = [node]
        for source in _stored(node):
            group += [other for other in groups.get(source, []) if other not in group]
        groups |= dict.fromkeys([source for member in group for source in _stored(member)], group)
    return list({id(group): group for group in groups.values()}.values())


def _stored(node: Node) -> list[Node]:
    """The stored tensors that ``node`` is computed from."""
    return [source for source in _sources(node) if source.op == "get_attr"]


def _sources(node: Node) -> set[Node]:
    """What ``node`` is computed from, itself included."""
    found, waiting = set[Node](), [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += current.all_input_nodes
    return found


def _spared(group: list[Node]) -> list[Node]:
    """The stored tensors that nothing else reads than what these nodes are computed by."""
    sources = {source for node in group for source in _sources(node)}
    return [source for source in sources if source.op == "get_attr" and all(user in sources for user in source.users)]


def _values(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def _bytes(nodes: list[Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _evaluate(graph_module: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    if node.op == "get_attr":
        return parameter(graph_module, node)
    where = f"'{node.meta.get('owner') or node.name}'"
    with torch.no_grad(), passes_told(where):  # a table may have no row for the last place of a sequence
        arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        assert callable(node.target)
        return node.target(*arguments, **keywords)
