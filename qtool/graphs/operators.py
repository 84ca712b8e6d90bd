"""What a node of a captured graph calls: families of operators, and what their arguments say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input)
AVERAGE_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
ADAPTIVE_POOLS = (
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
MAX_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
PADS = (aten.pad.default, aten.constant_pad_nd.default)
DROPOUTS = (
    aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default,
)  # fmt: skip


def packet_of(node: Node) -> Any:
    """The ``OpOverloadPacket`` of a node's operator, ``aten.add`` for ``aten.add.Tensor``; None of what calls none."""
    return getattr(node.target, "overloadpacket", None)


def groups_of(node: Node) -> int:
    """The groups of a convolution, in the same place of transposed ones; 1 of a linear layer."""
    value = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    assert isinstance(value, int)
    return value


def output_axis(anchor: Node) -> int:
    """The axis of a weight that indexes output channels: 0, or 1 for a transposed convolution."""
    return 1 if anchor.target in TRANSPOSED else 0


def by_axis(value: Any, count: int) -> list[int]:
    """A number for each of ``count`` axes, of one for all or a list."""
    values = list(value) if isinstance(value, tuple | list) else [value]
    return values * count if len(values) == 1 else values


def adaptive_windows(sizes: Sequence[Any], counts: Sequence[Any]) -> tuple[list[int], list[int]] | None:
    """Windows and strides of the pool that an adaptive one is; None where its cells differ or a size is open.

    Cell ``i`` of ``k`` is what lies from ``⌊i·n/k⌋`` to before ``⌈(i+1)·n/k⌉`` of ``n``. They all begin ``s = ⌊n/k⌋``
    apart, and then are as wide, where ``(k − 1)·(n mod k) < k``.

    >>> adaptive_windows([13, 8], [6, 2]), adaptive_windows([8], [3])
    (([3, 4], [2, 4]), None)
    """
    windows, strides = [], []
    for size, count in zip(sizes, counts, strict=True):
        if not isinstance(size, int) or not isinstance(count, int):
            return None
        if count > size or (count - 1) * (size % count) >= count:
            return None
        strides.append(size // count)
        windows.append(size - (count - 1) * strides[-1])
    return windows, strides
