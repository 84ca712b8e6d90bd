"""Norms that a model writes out, as the operators that they are.

    x / √(mean(x²) + ε) · w,    (x − mean(x)) / √(mean((x − mean(x))²) + ε) · w + b

over the last axis are an RMSNorm (arXiv 1910.07467), as language models have it, and a layer norm (arXiv 1607.06450).
Operator by operator such a norm is five to nine lines of the plan, one of which is taken for a pooling; it is one float
unit with one reason, and one kernel.

Left as it is: a norm over other axes, a standard deviation of n − 1 degrees of freedom, and one that ε is added to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.quantization.capture import aten, clean, parameter
from qtool.quantization.rewrites.respell import calls


def write_norms_whole(graph_module: GraphModule) -> int:
    """Rewrites in place; returns how many norms."""
    changed = 0
    for node in list(graph_module.graph.nodes):
        found = _normed(graph_module, node)
        if found is not None:
            _write(node, *found)
            changed += 1
    if changed:
        clean(graph_module)
    return changed


def _normed(graph_module: GraphModule, node: Node) -> tuple[Any, Node, float] | None:
    """The norm that a quotient is, of what, and its ε; None where it is none."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return None
    for source, total in _quotients(node):
        mean, epsilon = _sum(graph_module, total)
        whole = _whole(source)
        if epsilon is None:
            continue
        if whole is not None and (_is_variance(mean, whole) or _is_mean_square(mean, source)):
            return aten.layer_norm.default, whole, epsilon
        if _is_mean_square(mean, source):
            return aten.rms_norm.default, source, epsilon
    return None


def _quotients(node: Node) -> list[tuple[Node, Node]]:
    """What ``node`` may divide, and by the root of what."""
    if node.target is aten.div.Tensor and len(node.args) == 2 and not node.kwargs:
        pairs = [(node.args[0], _power(node.args[1], aten.sqrt.default, 0.5))]
    elif node.target is aten.mul.Tensor:
        pairs = [(source, _under(factor)) for source, factor in (node.args[:2], node.args[1::-1])]
    else:
        return []
    return [(source, total) for source, total in pairs if isinstance(source, Node) and total is not None]


def _under(factor: Any) -> Node | None:
    """The value of whose root ``factor`` is the reciprocal."""
    if calls(factor, aten.reciprocal.default):
        return _power(factor.args[0], aten.sqrt.default, 0.5)
    return _power(factor, aten.rsqrt.default, -0.5)


def _power(node: Any, operation: Any, exponent: float) -> Node | None:
    """What ``node`` is this power of, written as a power or as ``operation``."""
    power = calls(node, aten.pow.Tensor_Scalar) and node.args[1] == exponent
    source = node.args[0] if power or calls(node, operation) else None
    return source if isinstance(source, Node) else None


def _sum(graph_module: GraphModule, total: Node) -> tuple[Any, float | None]:
    """The two parts of a sum with one number; without a number where it is something else."""
    for value, number in (total.args[:2], total.args[1::-1]) if total.target is aten.add.Tensor else ():
        stored = parameter(graph_module, number)
        number = number if stored is None else float(stored) if stored.numel() == 1 else None
        if isinstance(number, int | float) and not total.kwargs:
            return value, float(number)
    return None, None


def _whole(centred: Node) -> Node | None:
    """What ``centred`` is without its mean over the last axis; None where it is something else."""
    source, mean = centred.args[:2] if calls(centred, aten.sub.Tensor) and not centred.kwargs else (None, None)
    return source if isinstance(source, Node) and _is_mean(mean, source) else None


def _is_mean(mean: Any, source: Any) -> bool:
    """Whether ``mean`` is ``source``'s over the last axis, which it keeps."""
    read = calls(mean, aten.mean.dim) and len(mean.args) == 3 and mean.args[0] is source and not mean.kwargs
    return bool(read) and mean.args[2] is True and _is_last(mean.args[1], source)


def _is_last(axes: Any, source: Node) -> bool:
    rank = source.meta["val"].dim()
    known = isinstance(source.meta["val"].shape[-1], int)
    return known and isinstance(axes, list | tuple) and [int(axis) % rank for axis in axes] == [rank - 1]


def _is_mean_square(mean: Any, source: Node) -> bool:
    square = mean.args[0] if calls(mean, aten.mean.dim) else None
    return _power(square, None, 2) is source and _is_mean(mean, square)


def _is_variance(variance: Any, source: Node) -> bool:
    """Whether ``variance`` is that of ``source`` over the last axis, a mean of squares."""
    if not isinstance(variance, Node) or variance.target not in (aten.var.dim, aten.var.correction):
        return False
    names = [argument.name for argument in variance.target._schema.arguments]
    given = dict(zip(names, variance.args, strict=False)) | variance.kwargs
    biased = given.get("unbiased", given.get("correction", 1)) in (False, 0) and given.get("keepdim") is True
    return biased and given["self"] is source and _is_last(given.get("dim"), source)


def _write(node: Node, norm: Any, source: Node, epsilon: float) -> None:
    """Writes the norm in the place of its last operator, which is a product or a sum with stored weights, if any is."""
    width = source.meta["val"].shape[-1]
    scaled, weight = _stored(node, aten.mul.Tensor, width)
    shifted, bias = _stored(scaled, aten.add.Tensor, width) if weight is not None else (scaled, None)
    last, stored = (scaled, [weight]) if norm is aten.rms_norm.default else (shifted, [weight, bias])
    last.target, last.args, last.kwargs = norm, (source, [width], *stored, epsilon), {}


def _stored(node: Node, operation: Any, width: Any) -> tuple[Node, Node | None]:
    """The operator that alone reads ``node`` and a stored number for each channel, and these; itself where none is."""
    user = next(iter(node.users), node)
    if len(node.users) != 1 or user.target is not operation or user.kwargs or len(user.args) != 2:
        return node, None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if not isinstance(other, Node) or other.op != "get_attr" or tuple(other.meta["val"].shape) != (width,):
        return node, None
    return user, other
