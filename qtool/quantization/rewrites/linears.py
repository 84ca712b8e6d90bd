"""One spelling for products with a stored matrix: ``linear``.

``x @ w``, ``torch.mm(x, w)`` and ``torch.addmm(b, x, w)`` (the layers of GPT-2 are written so) are linear layers
whose weight stands the other way round: ``linear(x, wᵀ, b)``. ``x @ w.T`` (Falcon's) is ``linear(x, w)``.
The other way, ``linear(x, v)`` with a vector (the mean of a distribution, in D-FINE) is ``x @ v``, whose result has an
axis less. Left out on purpose: products of two activations.
"""

from __future__ import annotations

import operator
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def write_linears(graph_module: GraphModule) -> int:
    """Rewrites in place each product with a stored matrix or its transpose, and layers of a vector; returns how many.

    What is not read transposed is stored so.
    """
    vectors = [node for node in graph_module.graph.nodes if node.target is aten.linear.default and _has_vector(node)]
    for node in vectors:
        source, vector, *bias = node.args
        with graph_module.graph.inserting_before(node):
            result = graph_module.graph.call_function(aten.matmul.default, (source, vector))
            result.meta = dict(node.meta)
            if bias and bias[0] is not None:
                result = graph_module.graph.call_function(aten.add.Tensor, (result, bias[0]))
                result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph_module.graph.erase_node(node)
    written: dict[str, str] = {}
    products = [node for node in graph_module.graph.nodes if _is_layer(node)]
    for node in products:
        (source, weight), bias = node.args[-2:], node.args[:-2]
        assert isinstance(weight, Node)
        stored = _turned(weight)
        with graph_module.graph.inserting_before(node):
            if stored is None:
                path = written.setdefault(str(weight.target), f"transposed_{len(written)}")
                if not hasattr(graph_module, path):
                    _store(graph_module, path, operator.attrgetter(str(weight.target))(graph_module))
                stored = graph_module.graph.get_attr(path)
                stored.meta["val"] = weight.meta["val"].t()
            layer = graph_module.graph.call_function(aten.linear.default, (source, stored, *bias))
        layer.meta = dict(node.meta)
        node.replace_all_uses_with(layer)
        graph_module.graph.erase_node(node)
    if products or vectors:
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return len(products) + len(vectors)


def _has_vector(node: Node) -> bool:
    weight = node.args[1]
    return isinstance(weight, Node) and weight.meta["val"].dim() == 1


def _is_layer(node: Node) -> bool:
    if node.target not in (aten.matmul.default, aten.mm.default, aten.addmm.default):
        return False
    *bias, source, weight = node.args
    return (
        isinstance(source, Node)
        and source.op != "get_attr"
        and not node.meta["val"].is_complex()
        and (_is_stored(weight, 2) or _turned(weight) is not None)
        and all(_is_stored(value, 1) for value in bias)
        and all(node.kwargs.get(factor, 1) == 1 for factor in ("beta", "alpha"))
    )


def _turned(value: object) -> Node | None:
    """The stored matrix that ``value`` is the transpose of; None where it is no such thing."""
    if not isinstance(value, Node) or value.target not in (aten.permute.default, aten.transpose.int):
        return None
    source, *axes = value.args
    turns = value.target is aten.permute.default or axes[0] % 2 != axes[1] % 2  # type: ignore[operator]
    return source if _is_stored(source, 2) and turns else None  # a permutation that changes nothing is dropped before


def _is_stored(value: object, rank: int) -> TypeGuard[Node]:
    return isinstance(value, Node) and value.op == "get_attr" and value.meta["val"].dim() == rank


def _store(graph_module: GraphModule, path: str, weight: Tensor) -> None:
    turned = weight.detach().t().contiguous()
    if isinstance(weight, nn.Parameter):
        graph_module.register_parameter(path, nn.Parameter(turned, requires_grad=weight.requires_grad))
    else:
        graph_module.register_buffer(path, turned)
