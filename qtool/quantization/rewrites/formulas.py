"""Activations that a model writes out, as the operators that runtimes have.

    0.5 · x · (1 + erf(x / √2)),    0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 x³))),    x · tanh(log(1 + eˣ))

are GELU (Hendrycks and Gimpel, arXiv 1606.08415), its approximation (GPT-2's, Bloom's) and Mish (arXiv 1908.08681),
each spelled in a dozen ways. So a formula is known by what it gives: operators between one value x and a product, read
by nothing else, are computed at points that tell one activation from another. Operator by operator such a formula would
be a handful of kernels, some of them integer, with a rounding behind each.

Left out on purpose: formulas with stored tensors in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from qtool.graphs.edits import clean

aten = torch.ops.aten

_STEPS = (
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.pow.Tensor_Scalar, aten.tanh.default, aten.erf.default, aten.sigmoid.default, aten.exp.default,
    aten.log.default, aten.log1p.default, aten.softplus.default, aten.reciprocal.default,
)  # fmt: skip
_MOST_STEPS = 16
_POINTS = torch.linspace(-8, 8, 129, dtype=torch.float64)
_TOLERANCE = 1e-6
"""More than numbers that are written with 8 digits differ by, and less than the two forms of GELU do (5e-4)."""
_KNOWN: tuple[tuple[Any, dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    (aten.gelu.default, {}, F.gelu),
    (aten.gelu.default, {"approximate": "tanh"}, partial(F.gelu, approximate="tanh")),
    (aten.silu.default, {}, F.silu),
    (aten.mish.default, {}, F.mish),
)


def write_formulas(graph_module: GraphModule) -> int:
    """Rewrites in place; returns how many products became activations."""
    nodes = list(graph_module.graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    changed = sum(_rewrite(node, order) for node in nodes if node.target in (aten.mul.Tensor, aten.div.Tensor))
    if changed:
        clean(graph_module)
    return changed


def _rewrite(product: Node, order: dict[Node, int]) -> bool:
    """Goes back from a product, always from the last operator, and looks where all of it comes from one value."""
    inner, waiting = [product], set(product.all_input_nodes)
    while waiting and len(inner) <= _MOST_STEPS:
        last = max(waiting, key=order.__getitem__)
        if len(waiting) == 1 and len(inner) > 1 and (known := _known(inner, last)) is not None:
            product.target, product.kwargs = known
            product.args = (last,)
            return True
        if last.target not in _STEPS or not set(last.users) <= set(inner):
            return False
        waiting = (waiting - {last}) | set(last.all_input_nodes)
        inner.append(last)
    return False


def _known(inner: list[Node], source: Node) -> tuple[Any, dict[str, Any]] | None:
    """The activation that operators make of a value of 32 bits, with its options; None where it is none of these."""
    value = source.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or source.op == "get_attr":
        return None
    values = {source: _POINTS}
    for node in reversed(inner):
        arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*arguments, **keywords)  # type: ignore[operator]
    found = values[inner[0]]
    return next((known[:2] for known in _KNOWN if (found - known[2](_POINTS)).abs().max() < _TOLERANCE), None)
