"""One spelling for each operator of a captured graph, so that a target's patterns need to know no other.

========================================================  ==========================================
what models write                                         what patterns look for
========================================================  ==========================================
``concat``, ``swapaxes``, ``clip``, ``multiply`` …        ``cat``, ``transpose``, ``clamp``, ``mul`` …
``view``, which refuses some layouts in memory            ``reshape``
``unflatten``, ``view_as``, ``squeeze()``                 ``reshape`` to fixed sizes
``movedim``, ``mT``, ``t``; an order that is the same     ``permute``; nothing
``chunk``, ``split``, ``narrow``; ``unbind``              ``slice``; ``select``: each part is a value of its own
``chunk`` of an axis of open size                         ``reshape`` and ``select``
``expand_as``                                             ``expand``
``clamp(min=0)``                                          ``relu``
``clamp(0, 0.5)``                                         ``clamp(0.0, 0.5)``
``rrelu``, which draws its slopes in training             ``leaky_relu`` of the mean slope
``relu6(x + 3) / 6``                                      ``hardsigmoid(x)``
``x * sigmoid(x)``, ``x * hardsigmoid(x)``                ``silu(x)``, ``hardswish(x)``
``square(x)``; ``x * x`` that only a mean reads            ``pow(x, 2)``
``glu``                                                   ``slice``, ``sigmoid`` and ``mul``
``padding="same"``                                        numbers, behind a padding where they are not symmetric
a row pooled to one cell                                  a mean
a mean over axes of size 1                                ``squeeze``, or nothing
``squeeze`` of an axis that is longer than 1              nothing
pooled to as many cells as divide the size; as it has     ``avg_pool``; nothing
a pool whose stride is left out                           the window's size as its stride
a maximum behind a padding with minus infinity            one that pads by itself
an average of parts of windows that counts no padding      that which leaves padding out
an average by a divisor of one's own                      ``avg_pool`` and ``mul``, behind a padding with ``ceil_mode``
attention without an axis for heads, or with several      attention with one head, or all in one axis
the largest or least of all numbers                       that over each axis
``stack``; a concatenation of one; of what is empty       ``cat`` of ``unsqueeze``; nothing; that of the others
``baddbmm`` (Bloom's attention)                           ``bmm``, its ``mul`` by a number, and ``add``
``addcmul`` (ResMLP's affine), ``addcdiv``                ``mul`` or ``div``, and ``add``, likewise
``x + 0``, ``x * 1``, a padding by nothing, ``x[:]``      nothing
``new_zeros``, ``ones_like`` … of a fixed size            ``full``
``embedding_bag`` over a matrix of indices                ``embedding`` and a sum, mean or maximum
``y[..., :2] = v``, ``y[:, 0] = v``                       ``cat`` of ``v`` and the rest
``.float()`` of what is float32; ``type_as``              nothing; ``to`` of a type
========================================================  ==========================================

What has to know the size of more than one dimension that is not fixed is left as it was written. ``squeeze()`` leaves
the batch where it is one, so that the result has as many dimensions for every batch.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qtool.graphs.edits import call_before
from qtool.graphs.operators import ADAPTIVE_POOLS, AVERAGE_POOLS, MAX_POOLS, PADS, adaptive_windows, aten
from qtool.graphs.shapes import same_sizes
from qtool.quantization.rewrites.bags import spell_bag
from qtool.quantization.rewrites.gated import spell_glu
from qtool.quantization.rewrites.heads import spell_attention
from qtool.quantization.rewrites.scatters import SCATTERS, spell_copy, spell_scatter
from qtool.quantization.rewrites.sizes import DIVISIONS, spell_size
from qtool.quantization.rewrites.splits import spell_part
from qtool.quantization.rewrites.windows import PADDED, spell_average, spell_maximum, spell_padding
from qtool.quantization.rewrites.zero_parts import spell_zero_parts

GATES: dict[Any, Any] = {aten.silu.default: aten.sigmoid.default, aten.hardswish.default: aten.hardsigmoid.default}
"""Activations that are their input times a gate, and the gate: silu(x) = x · sigmoid(x)."""

_OTHER_NAMES: dict[Any, Any] = {
    aten.clip.default: aten.clamp.default,
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.multiply.Scalar: aten.mul.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.divide.Scalar: aten.div.Tensor,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.true_divide.Scalar: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.subtract.Scalar: aten.sub.Tensor,
    aten.negative.default: aten.neg.default,
    aten.special_expit.default: aten.sigmoid.default,
    aten.linalg_matmul.default: aten.matmul.default,
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
_RESHAPES = (aten.unflatten.int, aten.view_as.default, aten.reshape_as.default, aten.squeeze.default)
_TURNS = (
    aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist, aten.mT.default, aten.t.default,
    aten.numpy_T.default,
)  # fmt: skip
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)
RANDOM_SLOPES: dict[Any, Any] = {
    aten.rrelu.default: aten.leaky_relu.default, aten.rrelu_.default: aten.leaky_relu_.default,
}  # fmt: skip
_SIXES = {aten.relu6.default: (), aten.hardtanh.default: (0, 6), aten.clamp.default: (0, 6)}
_ADDED_PRODUCTS: dict[Any, Any] = {
    aten.baddbmm.default: aten.bmm.default,
    aten.addcmul.default: aten.mul.Tensor,
    aten.addcdiv.default: aten.div.Tensor,
}
_FILLED: dict[Any, int | None] = {
    aten.new_zeros.default: 0, aten.zeros_like.default: 0, aten.new_ones.default: 1, aten.ones_like.default: 1,
    aten.new_full.default: None, aten.full_like.default: None,
}  # fmt: skip


def respell(node: Node) -> None:
    """Gives one operator, whose operands have theirs, the spelling that the patterns of targets know; in place."""
    node.target = _OTHER_NAMES.get(node.target, node.target)
    if (rule := _RULES.get(node.target)) is not None:
        rule(node)


def _spell_clamp(node: Node) -> None:
    """Bounds of floats are floats both: of a whole one beside a fraction torch's exporter makes a tensor, and fails.

    Those of integers stay: ONNX Runtime has a ReLU of int32 alone among them.
    """
    source, *bounds = node.args
    if not node.meta["val"].is_floating_point():
        return
    if bounds in ([0], [0, None]):
        node.target, node.args = aten.relu.default, (source,)
    else:
        node.args = (source, *(float(bound) if isinstance(bound, int) else bound for bound in bounds))


def spell_random_slope(node: Node) -> None:
    """Evaluation takes the middle of the slopes that training draws from. One that is drawn anyway is left alone."""
    given: list[Any] = [*node.args[1:], *[1 / 8, 1 / 3, False][len(node.args) - 1 :]]
    lower, upper, drawn = given[:3]
    if not drawn:
        node.target, node.args = RANDOM_SLOPES[node.target], (node.args[0], (lower + upper) / 2)


def _spell_adaptive_pool(node: Node) -> None:
    """A pool whose cells are all alike, as those that divide the input's size, is a plain one; to the input's own size
    it does nothing."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta["val"].shape, node.meta["val"].shape
    rank = 1 + ADAPTIVE_POOLS.index(node.target)
    sizes = list(zip(before[-rank:], after[-rank:], strict=True))
    if all(cells == 1 for _, cells in sizes):
        if rank != 2:
            node.target, node.args = aten.mean.dim, (source, list(range(len(before) - rank, len(before))), True)
    elif same_sizes(before[-rank:], after[-rank:]):
        _drop(node)
    elif pool := adaptive_windows(before[-rank:], after[-rank:]):
        node.target, node.args = AVERAGE_POOLS[rank - 1], (source, *pool)


def _spell_mean(node: Node) -> None:
    """A mean of one number is that number. OpenVINO (2026.4) gives another where the number is dequantized."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, axes = source.meta["val"], node.args[1] if len(node.args) > 1 else None
    sizes = [before.shape[axis] for axis in axes or ()]  # type: ignore[union-attr]
    if not sizes or not all(isinstance(size, int) and size == 1 for size in sizes) or node.kwargs:
        return
    if before.dim() == node.meta["val"].dim():
        _drop(node)
    else:
        node.target, node.args = aten.squeeze.dims, (source, list(axes))  # type: ignore[arg-type]


def _spell_added_product(node: Node) -> None:
    """beta · x + alpha · (a b), where a mask, a bias or a shift is added to a product, or to a quotient."""
    added, *factors = node.args
    assert isinstance(added, Node)
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", node.kwargs.get("value", 1))
    if beta == 0:  # what is added is not read then, be it NaN
        return
    product = call_before(node, _ADDED_PRODUCTS[node.target], *factors)
    node.target, node.args, node.kwargs = aten.add.Tensor, (_times(node, product, alpha), _times(node, added, beta)), {}


def _times(node: Node, value: Node, number: Any) -> Node:
    """What ``node`` reads, times a number."""
    if number == 1:
        return value
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.mul.Tensor, (value, number))
    made.meta = {**node.meta, "val": value.meta["val"]}
    return made


def _spell_extreme(node: Node) -> None:
    """No axes are all of them, which torch's exporter takes for a size that is computed."""
    source = node.args[0]
    assert isinstance(source, Node)
    if not (node.args[1] if len(node.args) > 1 else ()):
        node.args = (source, list(range(source.meta["val"].dim())), *node.args[2:])


def _spell_reshape(node: Node) -> None:
    """The sizes of the result, one of which may be unknown."""
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    if sizes.count(-1) <= 1:
        node.target, node.args = aten.reshape.default, (node.args[0], sizes)


def _spell_squeeze(node: Node) -> None:
    """Of axes longer than 1, which torch leaves as they are, ONNX knows no such thing."""
    source, axes = node.args
    assert isinstance(source, Node)
    before = source.meta["val"].shape
    if len(before) == node.meta["val"].dim():
        _drop(node)
    elif isinstance(axes, list | tuple):
        single = [axis for axis in axes if isinstance(size := before[axis], int) and size == 1]
        node.args = (source, single)


def _spell_turn(node: Node) -> None:
    """Which dimension goes where, seen on a tensor whose dimensions all differ."""
    source = node.args[0]
    assert isinstance(source, Node)
    marked = torch.empty(tuple(range(2, 2 + source.meta["val"].dim())), device="meta")
    order = [size - 2 for size in node.target(marked, *node.args[1:]).shape]  # type: ignore[operator]
    node.target, node.args = aten.permute.default, (source, order)


def _spell_order(node: Node) -> None:
    order = node.args[1]
    assert isinstance(order, list | tuple)
    if [int(str(axis)) % len(order) for axis in order] == list(range(len(order))):
        _drop(node)


def _spell_expand(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta["val"].shape, node.meta["val"].shape
    kept = [-1] * len(before)
    sizes = [*after[: len(after) - len(before)], *(k if a == b else b for k, a, b in _last(kept, before, after))]
    if all(isinstance(size, int) for size in sizes):
        node.target, node.args = aten.expand.default, (source, sizes)


def _last(kept: list[int], before: torch.Size, after: torch.Size) -> list[tuple[Any, Any, Any]]:
    return list(zip(kept, before, after[len(after) - len(before) :], strict=True))


def _spell_narrow(node: Node) -> None:
    source, axis, start, length = node.args
    if isinstance(start, int) and isinstance(length, int) and start >= 0:
        node.target, node.args = aten.slice.Tensor, (source, axis, start, start + length)


def _spell_square(node: Node) -> None:
    node.target, node.args = aten.pow.Tensor_Scalar, (node.args[0], 2)


def _spell_conversion(node: Node) -> None:
    """A conversion to the type that a value has is none, unless a copy is asked for; another tells the type alone."""
    source, after = node.args[0], node.meta["val"]
    assert isinstance(source, Node)
    before = source.meta["val"]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("copy") or before.device != after.device:
        return
    if before.dtype == after.dtype:
        _drop(node)
    else:
        node.target, node.args, node.kwargs = aten.to.dtype, (source, after.dtype), {}


def _spell_cat(node: Node) -> None:
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    filled = [part for part in parts if not _is_empty(part, node)] or list(parts[:1])
    if len(filled) == 1 and isinstance(filled[0], Node):
        _replace(node, filled[0])
        return
    if len(filled) < len(parts):
        node.args = (filled, *node.args[1:])
    spell_zero_parts(node)


def _is_empty(part: Any, whole: Node) -> bool:
    """Whether a part of a concatenation has no numbers whatever the batch, and makes no other type of the whole."""
    value: Tensor = part.meta["val"]
    return value.dtype == whole.meta["val"].dtype and any(isinstance(size, int) and size == 0 for size in value.shape)


def _spell_stack(node: Node) -> None:
    parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
    assert isinstance(parts, list | tuple)
    with node.graph.inserting_before(node):
        tall = [node.graph.call_function(aten.unsqueeze.default, (part, axis)) for part in parts]
    for part, source in zip(tall, parts, strict=True):
        assert isinstance(source, Node)
        part.meta = {**node.meta, "val": source.meta["val"].unsqueeze(axis)}
    node.target, node.args, node.kwargs = aten.cat.default, (tall, axis), {}
    _spell_cat(node)


def _spell_filled(node: Node) -> None:
    """A tensor of one number that takes shape and type of another is none of that tensor's: it can be stored."""
    value = node.meta["val"]
    if all(isinstance(size, int) for size in value.shape):
        given = _FILLED[node.target]
        number = node.args[-1] if given is None else given
        node.target, node.args = aten.full.default, (list(value.shape), number)
        node.kwargs = {"dtype": value.dtype, "device": value.device}


def _spell_neutral(node: Node) -> None:
    """A sum with 0 or a product with 1 is its operand, where it makes no other type of it."""
    neutral = 0 if node.target is aten.add.Tensor else 1
    for source, number in (node.args[:2], node.args[1::-1]):
        if not (isinstance(source, Node) and isinstance(number, int | float) and number == neutral):
            continue
        if source.meta["val"].dtype == node.meta["val"].dtype:
            _replace(node, source)
            return


def _spell_pad(node: Node) -> None:
    """Sizes that need no padding are padded by nothing all the same, as windows of attention are."""
    amounts = node.args[1]
    assert isinstance(amounts, list | tuple)
    if all(isinstance(amount, int) and amount == 0 for amount in amounts):
        _drop(node)


def _spell_slice(node: Node) -> None:
    """``x[:, 1:]`` is written as a slice of each axis, of which the first takes everything."""
    given: dict[str, Any] = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False)) | node.kwargs
    size, end = node.args[0].meta["val"].shape[given.get("dim", 0)], given.get("end")  # type: ignore[union-attr]
    whole = end in (None, sys.maxsize) or (isinstance(end, int) and isinstance(size, int) and end >= size)
    if whole and given.get("start") in (None, 0) and given.get("step", 1) == 1:
        _drop(node)


def _drop(node: Node) -> None:
    """Has the readers of an operator that does nothing read what it reads."""
    source = node.args[0]
    assert isinstance(source, Node)
    _replace(node, source)


def _replace(node: Node, source: Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _spell_sixth(node: Node) -> None:
    """``relu6(x + 3) / 6`` and ``x * relu6(x + 3) / 6``, with the division before or after the product."""
    inner = node.args[0]
    if not _is_sixth(node):
        return
    if (source := _shifted(inner)) is not None:
        node.target, node.args = aten.hardsigmoid.default, (source,)
    elif isinstance(inner, Node) and inner.target is aten.mul.Tensor and len(inner.users) == 1:
        sources = [value for value, gate in (inner.args[:2], inner.args[1::-1]) if _shifted(gate) is value]
        if sources:
            node.target, node.args = aten.hardswish.default, (sources[0],)


def _is_sixth(node: Node) -> bool:
    source, factor = node.args[0], node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if not isinstance(source, Node) or not isinstance(factor, int | float):
        return False
    return factor == 6 if node.target is aten.div.Tensor else abs(factor * 6 - 1) < 1e-6


def _shifted(node: Any) -> Node | None:
    """x where ``node`` is relu6(x + 3) and read once, as is the sum."""
    if not (isinstance(node, Node) and node.target in _SIXES and len(node.users) == 1):
        return None
    total = node.args[0]
    if tuple(node.args[1:]) != _SIXES[node.target] or node.kwargs or not calls(total, aten.add.Tensor):
        return None
    assert isinstance(total, Node)
    plain = len(total.users) == 1 and not total.kwargs and isinstance(total.args[0], Node)
    return total.args[0] if plain and total.args[1] == 3 else None  # type: ignore[return-value]


def calls(node: Any, operation: Any) -> bool:
    """Whether ``node`` is one, and calls this operator."""
    return isinstance(node, Node) and node.target is operation


def _spell_gated(node: Node) -> None:
    """A value times its own gate, which nothing else reads; a sixth written as a factor; a norm's square; times one."""
    _spell_sixth(node)
    if node.target is not aten.mul.Tensor:
        return
    if node.args[0] is node.args[1] and {user.target for user in node.users} == {aten.mean.dim}:
        _spell_square(node)  # no product with a rounding of its own
        return
    for source, gate in (node.args[:2], node.args[1::-1]):
        whole = next((whole for whole, own in GATES.items() if calls(gate, own)), None)
        if whole is not None and gate.args[0] is source and len(gate.users) == 1:  # type: ignore[union-attr]
            node.target, node.args = whole, (source,)
            return
    _spell_neutral(node)


_RULES: dict[Any, Callable[[Node], None]] = {
    **dict.fromkeys(_CLAMPS, _spell_clamp),
    **dict.fromkeys(RANDOM_SLOPES, spell_random_slope),
    **dict.fromkeys(_RESHAPES, _spell_reshape),
    **dict.fromkeys(_TURNS, _spell_turn),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _spell_squeeze),
    **dict.fromkeys(_CONVERSIONS, _spell_conversion),
    **dict.fromkeys(PADDED, spell_padding),
    **dict.fromkeys(_FILLED, _spell_filled),
    **dict.fromkeys(PADS, _spell_pad),
    **dict.fromkeys(ADAPTIVE_POOLS, _spell_adaptive_pool),
    **dict.fromkeys(AVERAGE_POOLS, spell_average),
    **dict.fromkeys(MAX_POOLS, spell_maximum),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _spell_extreme),
    aten.square.default: _spell_square,
    **dict.fromkeys(_ADDED_PRODUCTS, _spell_added_product),
    aten.mean.dim: _spell_mean,
    aten.permute.default: _spell_order,
    aten.expand_as.default: _spell_expand,
    aten.narrow.default: _spell_narrow,
    operator.getitem: spell_part,
    aten.cat.default: _spell_cat,
    aten.stack.default: _spell_stack,
    aten.alias.default: _drop,
    aten.slice.Tensor: _spell_slice,
    aten.add.Tensor: _spell_neutral,
    aten.div.Tensor: _spell_sixth,
    aten.mul.Tensor: _spell_gated,
    aten.scaled_dot_product_attention.default: spell_attention,
    aten.embedding_bag.padding_idx: spell_bag,
    aten.glu.default: spell_glu,
    aten.copy.default: spell_copy,
    **dict.fromkeys(SCATTERS, spell_scatter),
    **dict.fromkeys(DIVISIONS, spell_size),
}
