"""What slides a window over the last axes, a pool or a convolution, with its stride and padding in numbers.

A stride that is left out is the window's size. ``padding="same"`` is so many zeros on each side, behind a padding of
its own where that is an odd number. An average by a divisor of its own is a mean times a factor, which torch would
write into files without it; with ``ceil_mode`` the windows that reach beyond the end are filled up first. A maximum
has minus infinity around its input anyway, and takes a padding with it for its own, which may be wider at the end.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qtool.form import padding_of
from qtool.graphs.operators import AVERAGE_POOLS, MAX_POOLS, aten, by_axis

PADDED = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
"""Convolutions whose padding is a word, and those of numbers."""


def spell_stride(node: Node) -> None:
    """A pool's stride is told where it is left out, as pools that are modules tell theirs; in place."""
    source, kernel, *rest = node.args
    if not rest or not rest[0]:
        node.args = (source, kernel, kernel, *rest[1:])


def spell_maximum(node: Node) -> None:
    """A maximum over what is padded with minus infinity pads by itself, in place: so TensorFlow's "same" is written.

    That padding is no integer of its input's. Windows that reach further at the end are those of ``ceil_mode``.
    """
    spell_stride(node)
    padded: Any = node.args[0]
    rank = 1 + MAX_POOLS.index(node.target)
    amounts = padding_of(padded, -math.inf)
    if amounts is None or len(amounts) > 2 * rank:
        return
    given: list[Any] = [*node.args, *[0, 1, False][len(node.args) - 3 :]]
    kernel, strides, own, dilation = given[1:5]
    more = [*amounts[::2], *[0] * (rank - len(amounts) // 2)][::-1]
    begins = [a + b for a, b in zip(by_axis(own, rank), more, strict=True)]
    sizes, counts = padded.args[0].meta["val"].shape[-rank:], node.meta["val"].shape[-rank:]
    known = all(isinstance(size, int) for size in (*sizes, *counts))
    if not known or any(2 * begin > size for begin, size in zip(begins, by_axis(kernel, rank), strict=True)):
        return  # torch pads half a window at most
    for ceil in (False, True):
        window = (kernel, strides, begins, dilation, ceil)
        if node.target(torch.empty(1, 1, *sizes, device="meta"), *window).shape[2:] == counts:  # type: ignore[operator]
            node.args = (padded.args[0], *window)
            return


def spell_average(node: Node) -> None:
    """A sum over a window by a number is its mean times a factor; windows that ``ceil_mode`` cuts off are filled up.

    Without a divisor such windows are of what there is, which runtimes agree on only where no padding is to be counted:
    one that is becomes a padding of its own. Where none is cut off, ``ceil_mode`` goes.
    """
    spell_stride(node)
    given: list[Any] = [*node.args, *[0, False, True, None][len(node.args) - 3 :]]
    source, kernel, stride, pads, ceil, counted, divisor = given[:7]
    assert isinstance(source, Node)
    rank = 1 + AVERAGE_POOLS.index(node.target)
    kernel, strides, pads = (by_axis(value, rank) for value in (kernel, stride, pads))
    if divisor is None and ceil and not any(pads):
        node.args = (source, kernel, strides, pads, True, False)
    counts = divisor is None and ceil and counted and any(pads)
    needed = [0] * rank
    if ceil:
        before, after = source.meta["val"].shape[-rank:], node.meta["val"].shape[-rank:]
        if not all(isinstance(size, int) for size in (*before, *after)):
            if counts and all(s <= k - p for s, k, p in zip(strides, kernel, pads, strict=True)):
                # at no size does a window begin behind the input, and one may end behind the padding
                _spell_counted(node, source, kernel, strides, pads, [p + 1 for p in pads])
            return
        needed = [(m - 1) * s + k - p - n for n, m, s, k, p in zip(before, after, strides, kernel, pads, strict=True)]
    if divisor is None:
        if counts:
            _spell_counted(node, source, kernel, strides, pads, needed)
        elif ceil and _are_whole(needed, pads):
            node.args = (source, kernel, strides, pads, False, counted)
        return
    if ceil:
        source, pads = _padded_by(node, source, pads, [max(more, 0) for more in needed]), [0] * rank
    window = (source, kernel, strides, *([pads] if any(pads) else []))
    with node.graph.inserting_before(node):
        mean = node.graph.call_function(node.target, window)  # type: ignore[arg-type]
    mean.meta = dict(node.meta)
    node.target, node.args, node.kwargs = aten.mul.Tensor, (mean, math.prod(kernel) / divisor), {}


def _are_whole(needed: list[int], pads: list[int]) -> bool:
    """Whether no window ends behind the padding."""
    return all(more <= pad for more, pad in zip(needed, pads, strict=True))


def _spell_counted(
    node: Node, source: Node, kernel: list[int], strides: list[int], pads: list[int], needed: list[int]
) -> None:
    """Has an average over cut windows count zeros of the input's; ``needed`` are those up to the last window's end."""
    if _are_whole(needed, pads):
        node.args = (source, kernel, strides, pads, False, True)
        return
    ends = [min(max(more, 0), p) for more, p in zip(needed, pads, strict=True)]  # more would be windows of zeros alone
    node.args = (_padded_by(node, source, pads, ends), kernel, strides, [0] * len(pads), True, False)


def spell_padding(node: Node) -> None:
    """A convolution whose padding is a word has it in numbers, in place."""
    given: list[Any] = [*node.args, *[None, 1, "valid", 1, 1][len(node.args) - 2 :]]
    source, weight, bias, stride, word, dilation, groups = given
    assert isinstance(source, Node)
    assert isinstance(weight, Node)
    sizes = list(weight.meta["val"].shape[2:])
    strides, dilations = (by_axis(value, len(sizes)) for value in (stride, dilation))
    total = [d * (k - 1) for d, k in zip(dilations, sizes, strict=True)] if word == "same" else [0] * len(sizes)
    if any(t % 2 for t in total):
        source = _padded_by(node, source, [t // 2 for t in total], [t - t // 2 for t in total])
        total = [0] * len(sizes)
    node.target = PADDED[node.target]  # type: ignore[index]
    node.args = (source, weight, bias, strides, [t // 2 for t in total], dilations, groups)


def _padded_by(node: Node, source: Node, begins: list[int], ends: list[int]) -> Node:
    """``source`` behind a padding of its last axes with zeros, in front of ``node``."""
    amounts = [end for pair in zip(reversed(begins), reversed(ends), strict=True) for end in pair]
    with node.graph.inserting_before(node):
        padded = node.graph.call_function(aten.constant_pad_nd.default, (source, amounts, 0.0))
    padded.meta = {**node.meta, "val": _padded(source.meta["val"], [a + b for a, b in zip(begins, ends, strict=True)])}
    return padded


def _padded(value: Tensor, total: list[int]) -> Tensor:
    """A stand-in of the padded shape; computing it would fix the batch."""
    outer = value.dim() - len(total)
    sizes = (size + t for size, t in zip(value.shape[outer:], total, strict=True))
    return value.new_empty([*value.shape[:outer], *sizes])
