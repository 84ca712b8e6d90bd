"""Common subexpressions: what a graph computes twice from the same values is computed once.

torch's exporter merges them as it writes the file, after quantizers have been placed on each; a graph that has none
left means the same in both places. They are common: the query, key and value of an attention block reshape one
input three times, a pre-activation block calls ``relu`` once for each branch, a model applies one layer twice.

Buffers that hold the same are one as well: the blocks of a language model often have a causal mask each, and a file
would have them all.

In training form a batch-norm called twice on the same values updates its running statistics once. Left out on
purpose: parameters of two names and equal values, which may part in training, and what layers have as weights and
running statistics.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qtool.form import DEQUANTIZE, QUANTIZE
from qtool.graphs.operators import DROPOUTS
from qtool.nested import raw_bytes

_LAYERS = ("batch_norm", "instance_norm", "linear", "conv", "lstm", "gru", "rnn")


def merge_repeats(graph_module: GraphModule) -> int:
    """Lets the first of equal calls serve all; in place. Returns how many went. Random operators stay."""
    first: dict[Any, Node] = {}
    merged = 0
    for node in list(graph_module.graph.nodes):
        key = _key(node)
        if key is None or first.setdefault(key, node) is node:
            continue
        node.replace_all_uses_with(first[key])
        graph_module.graph.erase_node(node)
        merged += 1
    if merged:
        graph_module.recompile()
    return merged


def _key(node: Node) -> Any:
    """Equal for calls that give equal results; None where a call may give another each time, or cannot be compared."""
    if node.op == "get_attr":
        return node.op, _content(node) or node.target
    if node.op != "call_function" or node.target in DROPOUTS or _draws_or_writes(node.target) or _is_weight(node):
        return None
    key = node.target, _comparable(node.args), _comparable(node.kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _content(node: Node) -> Any:
    """What a buffer holds, but for one that is a layer's own."""
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    layers = any(getattr(user.target, "_opname", "").startswith(_LAYERS) for user in node.users)
    if layers or isinstance(value, nn.Parameter) or not isinstance(value, Tensor):
        return None
    return value.dtype, value.device, value.shape, hashlib.sha256(raw_bytes(value)).digest()


def _is_weight(node: Node) -> bool:
    """Whether it dequantizes a stored tensor: each layer has that to itself, though several share the integers."""
    return node.target in DEQUANTIZE and all(map(_is_stored, node.all_input_nodes))


def _is_stored(node: Node) -> bool:
    return node.op == "get_attr" or (node.target in QUANTIZE and all(map(_is_stored, node.all_input_nodes)))


def draws(target: Any) -> bool:
    """Whether an operator gives other random numbers each time."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _draws_or_writes(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) not in ("_operator", "math")
    return draws(target) or target._schema.is_mutable


def _comparable(value: Any) -> Any:
    """``value`` with tuples for containers and numbers as they are written, since 1 == 1.0 == True and 0.0 == -0.0."""
    if isinstance(value, dict):
        return _comparable(list(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_comparable(item) for item in value)
    return repr(value) if isinstance(value, bool | int | float) else value
