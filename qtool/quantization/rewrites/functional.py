"""Nothing in place: a captured graph writes into no tensor.

An in-place operator becomes its functional twin (``relu_`` → ``relu``), and whatever reads the overwritten tensor later
reads the result. That is only right while no other name for the same memory is read later: a view that was taken
before, or the tensor that the overwritten one is a view of. Where one is, or where a part of a tensor is assigned to,
torch's own functionalization is asked, which knows all views and spells batch-norm and flatten differently. A
quantizer on a tensor that is still written into would separate it from its views, so none may be left.

Behind that each operator gets its one spelling (``respell.py``): one that only copies can go once nothing is written
into the copy.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.graphs.operators import DROPOUTS, aten
from qtool.graphs.programs import as_graph
from qtool.graphs.structures import quiet_pytree
from qtool.nested import tensors
from qtool.quantization.rewrites.regions import inline_regions
from qtool.quantization.rewrites.respell import RANDOM_SLOPES, respell, spell_random_slope

_ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)


def make_functional(graph_module: GraphModule) -> None:
    """Rewrites in-place operators, where that keeps the meaning, and gives each operator its one spelling."""
    inline_regions(graph_module)
    graph = graph_module.graph
    for node in reversed(graph.nodes):  # of a norm that is used twice the later count reads the earlier
        if _is_guard(node) or _counts_batches(node):
            graph.erase_node(node)
    for node in list(graph.nodes):
        twin = _twin(node)
        if twin is not None and _is_safe(node):
            _replace_later(node, twin)
    for node in list(graph.nodes):
        respell(node)
    graph.eliminate_dead_code(_has_effect)
    graph.lint()
    graph_module.recompile()


def _has_effect(node: Node) -> bool:
    """Whether a node that nothing reads has to stay; attention need not, though torch counts it among what is drawn."""
    return node.is_impure() and node.target is not aten.scaled_dot_product_attention.default


def _is_guard(node: Node) -> bool:
    """Whether a node only checks shapes, types or sizes of what was captured."""
    return (node.op == "call_module" and "guard" in str(node.target)) or node.target in _ASSERTIONS


def mutations(graph_module: GraphModule) -> list[Node]:
    """The operators that still write into a tensor."""
    schemas = [(node, getattr(node.target, "_schema", None)) for node in graph_module.graph.nodes]
    return [node for node, schema in schemas if schema is not None and schema.is_mutable]


def functionalized(program: torch.export.ExportedProgram) -> GraphModule:
    """The program's graph after torch's functionalization, in evaluation form, respelled as captured graphs are.

    What the model writes into its inputs and buffers is dropped: it is no output.
    """
    _decide_draws(program)
    with quiet_pytree():
        graph_module = as_graph(program.run_decompositions({}))
    for node in list(graph_module.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr"):
            node.replace_all_uses_with(node.args[1])
            graph_module.graph.erase_node(node)
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            _respell_norm(node)
    graph_module.graph.eliminate_dead_code()
    make_functional(graph_module)
    return graph_module


def _decide_draws(program: torch.export.ExportedProgram) -> None:
    """Removes dropout that is off: it returns its input's own memory, which functionalization takes for a copy.

    A slope that would be drawn in training gets its mean: functionalization has no spelling for it in evaluation.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target in DROPOUTS and node.args[2] is False and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in RANDOM_SLOPES:
            spell_random_slope(node)
    program.graph_module.recompile()


def _respell_norm(node: Node) -> None:
    *tensors, momentum, epsilon = node.args
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(aten.batch_norm.default, (*tensors, False, momentum, epsilon, False))
    for item in list(node.users):
        if item.args[1] == 0:
            norm.meta = dict(item.meta)
            norm.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            item.replace_all_uses_with(norm)


def _counts_batches(node: Node) -> bool:
    """Batch-norm's own count, which only a cumulative average would need."""
    source = node.args[0] if node.target is aten.add_.Tensor else None
    while isinstance(source, Node) and source.target is aten.add_.Tensor:
        source = source.args[0]
    return isinstance(source, Node) and str(source.target).endswith("num_batches_tracked") and not node.users


def _twin(node: Node) -> Any:
    """The functional twin of an operator that writes into its first argument alone; None where it has none.

    What is written keeps its type, also where a twin would take that of another argument. A copy is left to torch.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or not (schema.name.startswith("aten::") and schema.name.endswith("_")):
        return None
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    if written[:1] != [True] or any(written[1:]) or node.target is aten.copy_.default:
        return None
    types = {value.dtype for n in node.all_input_nodes for value in tensors(n.meta.get("val"))}
    if len({kind for kind in types if kind.is_floating_point}) > 1:
        return None
    packet = getattr(aten, schema.name.removeprefix("aten::")[:-1], None)
    twins = (getattr(packet, name) for name in (packet.overloads() if packet is not None else ()))
    return next((twin for twin in twins if _takes(twin) == _takes(node.target)), None)


def _takes(target: Any) -> list[tuple[str, str]]:
    """The types of an operator's arguments, and the names of all but the first."""
    arguments = target._schema.arguments
    return [(argument.name if place else "", str(argument.type)) for place, argument in enumerate(arguments)]


def _replace_later(node: Node, twin: Any) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    order = _order(node)
    for user in list(source.users):
        if user is not node and order[user] > order[node]:
            user.replace_input_with(source, node)
    node.target = twin


def _is_safe(node: Node) -> bool:
    """Whether no name for the overwritten memory, but the one overwritten, is read after ``node``."""
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    memory = _memory(source)
    if memory.op == "get_attr":
        return False
    order = _order(node)
    others = [n for n in order if n not in (source, node) and order[n] < order[node] and _memory(n) is memory]
    return not any(order[user] > order[node] for other in others for user in other.users)


def _order(node: Node) -> dict[Node, int]:
    return {other: index for index, other in enumerate(node.graph.nodes)}


def _memory(node: Node) -> Node:
    """The node whose memory ``node`` names: what it is a view of, however often."""
    while node.op == "call_function":
        source, index = node.args[0] if node.args else None, 0
        if node.target is operator.getitem and isinstance(source, Node):
            index = node.args[1] if isinstance(node.args[1], int) else 0
            producer, source = source, source.args[0]
        else:
            producer = node
        if not (isinstance(source, Node) and _shares_memory(producer, index)):
            break
        node = source
    return node


def _shares_memory(producer: Node, index: int) -> bool:
    """Whether an operator's output is (or, with dropout switched off, is in fact) its first argument's memory."""
    if producer.target in DROPOUTS:
        return producer.args[2] is False
    schema = getattr(producer.target, "_schema", None)
    returns: Any = schema.returns if schema is not None else ()
    listed = returns[index] if index < len(returns) else returns[0] if len(returns) == 1 else None
    return listed is not None and listed.alias_info is not None
