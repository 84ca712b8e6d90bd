"""Products and sums with stored numbers between integers, written as a convolution of one tap for each channel.

    y = f · x + h,    f and h one number for each channel, or one for all

is what a batch-norm does (``norms.py``) and has the same integer kernel, whatever the model calls it: a learnable
affine behind an activation (HGNetV2), a gain (networks without normalisation). As a product and a sum with constants
it would run in float, with everything behind it. What ``scales.py`` can fold into a layer has been folded before.

Left as it is: what stands between floats, where a convolution would round its input; and vectors, which the linear
layers that read them may take in (:mod:`~qtool.quantization.rewrites.input_affines`).
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, store_before
from qtool.graphs.operators import aten
from qtool.graphs.shapes import same_sizes
from qtool.quantization.rewrites.scales import stored_numbers
from qtool.quantization.targets import RELU_LIKE, Target

_DEPTHWISE = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_ABSORBED = (*RELU_LIKE, aten.batch_norm.default)


def write_affines(graph_module: GraphModule, target: Target) -> list[Node]:
    """Rewrites in place each product and sum with stored numbers of what is integer; returns the convolutions."""
    made: list[Node] = []
    integer: set[Node] = set()
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node in integer:
            continue
        if runs_in_integers(node, target, integer):
            integer.add(node)
        elif (ends := affine_at(graph_module, node, integer)) is not None and _is_read_in_integers(ends[0], target):
            made.append(_convolve(graph_module, node, *ends))
            integer.add(made[-1])
    if made:
        clean(graph_module)
    return made


def runs_in_integers(node: Node, target: Target, integer: set[Node]) -> bool:
    """Whether the target has an integer kernel for an operator of such operands, as far as is known before a plan."""
    tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    for pattern in target.patterns:
        if node.target not in pattern.anchors or pattern.in_float or (pattern.accepts and pattern.accepts(node)):
            continue
        if pattern.weighted:
            return all(source.op == "get_attr" for source in tensors[1:])
        return all(source in integer for source in tensors)
    return node.target in _ABSORBED and tensors[0] in integer


def _is_read_in_integers(node: Node, target: Target) -> bool:
    anchors = {anchor for pattern in target.patterns if not pattern.in_float for anchor in pattern.anchors}
    absorbed = (user for user in node.users if user.target in _ABSORBED)
    return any(user.target in anchors for user in node.users) or any(
        _is_read_in_integers(user, target) for user in absorbed
    )


def affine_at(
    graph_module: GraphModule, node: Node, integer: Set[Node], axis: int = 1, *, whole: bool = False
) -> tuple[Node, Node, Tensor, Tensor] | None:
    """The last operator of an affine that begins at ``node``, what it is of, factor and shift along ``axis``.

    Products and sums that are read by the next alone are one affine. With ``whole``, it may be of whole numbers.
    """
    found = _step(graph_module, node, integer, axis, whole)
    if found is None:
        return None
    source, last = found[0], node
    factor, shift = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    while found is not None:
        numbers = found[1]
        factor, shift = (factor, shift + numbers) if node.target in _SUMS else (factor * numbers, shift * numbers)
        last, node = node, next(iter(node.users), node)
        found = _step(graph_module, node, {last}, axis) if len(last.users) == 1 else None
    return last, source, factor, shift


def _step(
    graph_module: GraphModule, node: Node, integer: Set[Node], axis: int, whole: bool = False
) -> tuple[Node, Tensor] | None:
    """What a product or a sum with stored numbers is of, and the numbers: factors, or summands."""
    if node.target not in (*_PRODUCTS, *_SUMS) or node.kwargs:
        return None
    value = node.meta["val"]
    rank = value.dim()
    if rank < 2 or (axis == 1 and rank not in _DEPTHWISE):
        return None
    pairs = [node.args[:2]] if node.target in (aten.div.Tensor, aten.sub.Tensor) else [node.args[:2], node.args[1::-1]]
    for source, given in pairs:
        if not isinstance(source, Node) or source not in integer or not isinstance(value.shape[axis], int):
            continue
        if not value.is_floating_point() or (source.meta["val"].dtype != value.dtype and not whole):
            continue  # whole numbers that become floats by it, which is what layers take
        numbers = stored_numbers(graph_module, given, value, axis % rank)
        if numbers is not None and same_sizes(source.meta["val"].shape, value.shape):
            return source, {aten.div.Tensor: 1 / numbers, aten.sub.Tensor: -numbers}.get(node.target, numbers)
    return None


def _convolve(graph_module: GraphModule, first: Node, last: Node, source: Node, factor: Tensor, shift: Tensor) -> Node:
    rank, channels = last.meta["val"].dim(), last.meta["val"].shape[1]
    tall = factor.expand(channels).reshape(-1, *[1] * (rank - 1))
    values = {f"{first.name}_weight": tall, f"{first.name}_bias": shift.expand(channels)}
    ones, zeros = [1] * (rank - 2), [0] * (rank - 2)
    stored = [store_before(graph_module, last, name, value.float().contiguous()) for name, value in values.items()]
    with last.graph.inserting_before(last):
        made = last.graph.call_function(_DEPTHWISE[rank], (source, *stored, ones, zeros, ones, channels))
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    return made
