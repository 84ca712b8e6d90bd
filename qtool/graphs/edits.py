"""Edits of a captured graph: its stored tensors, operators with what is known of their results, and what is unused."""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qtool.graphs.operators import DROPOUTS, aten
from qtool.graphs.structures import quiet_pytree


def copied(graph_module: GraphModule) -> GraphModule:
    """A deep copy."""
    with quiet_pytree():
        return copy.deepcopy(graph_module)


def owner(node: Node) -> str:
    """The dotted path of the module that a node belongs to; empty for the model itself."""
    if "owner" in node.meta:
        return str(node.meta["owner"])
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def remove_identities(graph_module: GraphModule) -> int:
    """Removes dropout, which is the identity outside training, and ``detach``, which only gradients know of.

    Returns how many there were.
    """
    found = [node for node in graph_module.graph.nodes if node.target in (*DROPOUTS, aten.detach.default)]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return len(found)


def parameter(graph_module: GraphModule, node: Any) -> Tensor | None:
    """The tensor behind a ``get_attr`` node; None for an absent argument, and for one that the graph computes."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: Any = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value.detach()


def set_parameter(graph_module: GraphModule, path: str, value: Tensor, *, like: str | None = None) -> None:
    """Stores ``value`` under a dotted path of the graph module, as a parameter where it is a float.

    It trains if the tensor under the path ``like`` does, which may be the one that it replaces. That one's place is
    kept, since files are written in this order: ranges that are repeated change other tensors first.
    """
    trains = like is not None and operator.attrgetter(like)(graph_module).requires_grad
    holder_path, _, name = path.rpartition(".")
    holder: Any = graph_module
    for part in holder_path.split(".") if holder_path else ():
        if not hasattr(holder, part):
            holder.add_module(part, nn.Module())
        holder = getattr(holder, part)
    if hasattr(holder, name) and name not in (holder._parameters if value.is_floating_point() else holder._buffers):
        delattr(holder, name)
    if value.is_floating_point():
        holder.register_parameter(name, nn.Parameter(value, requires_grad=trains))
    else:
        holder.register_buffer(name, value)


def store_before(graph_module: GraphModule, node: Node, path: str, value: Tensor, *, like: str | None = None) -> Node:
    """Stores ``value`` as :func:`set_parameter` does, and reads it in front of ``node``."""
    set_parameter(graph_module, path, value, like=like)
    with node.graph.inserting_before(node):
        made = node.graph.get_attr(path)
    made.meta["val"] = node.meta["val"].new_empty(list(value.shape))
    return made


def call_before(node: Node, operation: Any, *args: Any, **kwargs: Any) -> Node:
    """A new operator in front of ``node`` and of its module, whose result is known as its operands' are."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(operation, args, kwargs)
    with enable_python_dispatcher():  # without it torch 2.11 multiplies no matrices of open size
        value = operation(*map_arg(args, lambda read: read.meta["val"]), **kwargs)
    made.meta = {**node.meta, "val": value}
    return made


def clean(graph_module: GraphModule) -> None:
    """Removes nodes and stored tensors that nothing reads any more, and has the graph checked and its code written."""
    graph_module.graph.eliminate_dead_code()
    drop_unused(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()


def drop_unused(graph_module: GraphModule) -> None:
    """Removes parameters and buffers that no node reads or called module holds, so that none reaches the artifact."""
    used = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    called = tuple(f"{node.target}." for node in graph_module.graph.nodes if node.op == "call_module")
    for path, _ in [
        *graph_module.named_parameters(remove_duplicate=False),
        *graph_module.named_buffers(remove_duplicate=False),
    ]:
        if path not in used and not path.startswith(called):
            holder, _, name = path.rpartition(".")
            delattr(graph_module.get_submodule(holder), name)


def set_training(graph: GraphModule, *, batch_norm: bool, dropout: bool) -> None:
    """Writes the training flag of every batch-norm and dropout in a captured graph.

    A captured graph holds these flags as constants, so ``train()`` and ``eval()`` cannot reach them.
    """
    changed = False
    for node in graph.graph.nodes:
        position, value = (5, batch_norm) if node.target is aten.batch_norm.default else (2, dropout)
        if node.target is aten.batch_norm.default or node.target in DROPOUTS:
            changed |= node.args[position] is not value
            node.update_arg(position, value)
        elif node.target is aten.add_.Tensor and _counts_batches(node):
            changed |= node.args[1] != int(batch_norm)
            node.update_arg(1, int(batch_norm))
    if changed:
        graph.recompile()


def _counts_batches(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and str(source.target).endswith("num_batches_tracked")
