"""Norms that a model writes out, as the operators that they are.

    x / √(mean(x²) + ε) · w,    (x − mean(x)) / √(mean((x − mean(x))²) + ε) · w + b

over the last axis are an RMSNorm (arXiv 1910.07467), as language models have it, and a layer norm (arXiv 1607.06450).
Operator by operator such a norm is five to nine lines of the plan, one of which is taken for a pooling; it is one float
unit with one reason, and one kernel. A layer norm over the channels of images, as ConvNeXt's own code has it, is one
between two transpositions, which takes half of the time in ONNX Runtime, and SmoothQuant finds it.

Left as it is: any other norm over other axes, a standard deviation of n − 1 degrees of freedom, and one that ε is added
to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean, parameter, store_before
from qtool.graphs.operators import aten
from qtool.quantization.rewrites.respell import calls


def write_norms_whole(graph_module: GraphModule) -> int:
    """Rewrites in place; returns how many norms."""
    changed = 0
    for node in list(graph_module.graph.nodes):
        found = _normed(graph_module, node)
        if found is not None:
            changed += _write(graph_module, node, *found)
    if changed:
        clean(graph_module)
    return changed


def _normed(graph_module: GraphModule, node: Node) -> tuple[Any, Node, float, int] | None:
    """The norm that a quotient is, of what, its ε and its axis; None where it is none."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return None
    for source, total in _quotients(node):
        mean, epsilon = _sum(graph_module, total)
        if epsilon is None:
            continue
        last = source.meta["val"].dim() - 1
        for axis in (last, 1) if last > 1 else (last,):
            whole = _whole(source, axis)
            if whole is not None and (_is_variance(mean, whole, axis) or _is_mean_square(mean, source, axis)):
                return aten.layer_norm.default, whole, epsilon, axis
        if _is_mean_square(mean, source, last):
            return aten.rms_norm.default, source, epsilon, last
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


def _whole(centred: Node, axis: int) -> Node | None:
    """What ``centred`` is without its mean over an axis; None where it is something else."""
    source, mean = centred.args[:2] if calls(centred, aten.sub.Tensor) and not centred.kwargs else (None, None)
    return source if isinstance(source, Node) and _is_mean(mean, source, axis) else None


def _is_mean(mean: Any, source: Any, axis: int) -> bool:
    """Whether ``mean`` is ``source``'s over an axis, which it keeps."""
    read = calls(mean, aten.mean.dim) and len(mean.args) == 3 and mean.args[0] is source and not mean.kwargs
    return bool(read) and mean.args[2] is True and _is_over(mean.args[1], source, axis)


def _is_over(axes: Any, source: Node, axis: int) -> bool:
    rank = source.meta["val"].dim()
    known = isinstance(source.meta["val"].shape[axis], int)
    return known and isinstance(axes, list | tuple) and [int(each) % rank for each in axes] == [axis]


def _is_mean_square(mean: Any, source: Node, axis: int) -> bool:
    square = mean.args[0] if calls(mean, aten.mean.dim) else None
    return _power(square, None, 2) is source and _is_mean(mean, square, axis)


def _is_variance(variance: Any, source: Node, axis: int) -> bool:
    """Whether ``variance`` is that of ``source`` over an axis, a mean of squares."""
    if not isinstance(variance, Node) or variance.target not in (aten.var.dim, aten.var.correction):
        return False
    names = [argument.name for argument in variance.target._schema.arguments]
    given = dict(zip(names, variance.args, strict=False)) | variance.kwargs
    biased = given.get("unbiased", given.get("correction", 1)) in (False, 0) and given.get("keepdim") is True
    return biased and given["self"] is source and _is_over(given.get("dim"), source, axis)


def _write(graph_module: GraphModule, node: Node, norm: Any, source: Node, epsilon: float, axis: int) -> bool:
    """Writes the norm in the place of its last operator, which is a product or a sum with stored weights, if any is.

    Whether it did: between transpositions there is one with weights alone.
    """
    value = source.meta["val"]
    width, behind = value.shape[axis], value.dim() - 1 - axis
    scaled, weight = _stored(node, aten.mul.Tensor, width, behind)
    shifted, bias = _stored(scaled, aten.add.Tensor, width, behind) if weight is not None else (scaled, None)
    last, stored = (scaled, [weight]) if norm is aten.rms_norm.default else (shifted, [weight, bias])
    if not behind:
        last.target, last.args, last.kwargs = norm, (source, [width], *stored, epsilon), {}
        return True
    if weight is None:
        return False
    flat = [each and _flat(graph_module, last, each) for each in stored]
    rows = call_before(last, aten.permute.default, source, [0, *range(2, value.dim()), 1])
    normed = call_before(last, norm, rows, [width], *flat, epsilon)
    back = [0, value.dim() - 1, *range(1, value.dim() - 1)]
    last.target, last.args, last.kwargs = aten.permute.default, (normed, back), {}
    return True


def _flat(graph_module: GraphModule, near: Node, stored: Node) -> Node:
    """A stored tensor as a vector."""
    value = parameter(graph_module, stored)
    assert value is not None
    return store_before(graph_module, near, f"{stored.name}_flat", value.flatten(), like=str(stored.target))


def _stored(node: Node, operation: Any, width: Any, behind: int) -> tuple[Node, Node | None]:
    """The operator that alone reads ``node`` and a stored number for each channel, and these; itself where none is.

    ``behind`` is how many axes follow the channels.
    """
    user = next(iter(node.users), node)
    if len(node.users) != 1 or user.target is not operation or user.kwargs or len(user.args) != 2:
        return node, None
    other = user.args[1] if user.args[0] is node else user.args[0]
    ones = [1] * behind
    if not isinstance(other, Node) or other.op != "get_attr":
        return node, None
    if list(other.meta["val"].shape) not in ([width, *ones], *([[1, width, *ones]] if behind else [])):
        return node, None
    return user, other
