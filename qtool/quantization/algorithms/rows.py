"""Rows: what a layer multiplies by its weights, as matrices, on a sample of its output positions.

A convolution is one linear map applied at every output position. With the ``K = inputs of a group × taps`` values that
it reads there written as a row ``x``, its outputs are ``W x + b``, for each group of channels on its own; a linear
layer is the case of one group whose positions are all its leading dimensions. Methods that fit weights need rows, not
images, and far fewer than there are: positions are drawn by seed, the same for two inputs of one layer.

Left out on purpose: transposed convolutions and three dimensions, which ``reason`` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from qtool.quantization.algorithms.streams import groups_of
from qtool.quantization.capture import aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default)


def reason(node: Node) -> str:
    """Why a layer cannot be written as rows; empty when it can."""
    if node.target is aten.linear.default:
        return ""
    if node.target not in _CONVOLUTIONS:
        return f"no rows of {str(node.target).removeprefix('aten.').split('.')[0]}"
    return "a padding given by name" if isinstance(_argument(node, 4, 0), str) else ""


def rows(node: Node, weight: Tensor, value: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """The rows of ``most`` output positions of each sample (all where there are fewer): groups × rows × K, float32.

    ``value`` is the layer's input, a batch; ``weight`` gives its kernel's size; ``generator`` draws the positions.
    """
    if node.target is aten.linear.default:
        flat = value.reshape(len(value), -1, value.shape[-1])
        return flat[:, _drawn(flat.shape[1], most, generator).to(value.device)].reshape(1, -1, value.shape[-1])
    flat_weight, padded = (t.unsqueeze(2) if value.dim() == 3 else t for t in (weight, value))
    stride, padding, dilation = (_pair(node, index, default, value) for index, default in ((3, 1), (4, 0), (5, 1)))
    padded = functional.pad(padded, (padding[1], padding[1], padding[0], padding[0]))
    kernel = flat_weight.shape[2:]
    sizes = [(padded.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(2)]
    chosen = _drawn(sizes[0] * sizes[1], most, generator)
    vertical = (chosen // sizes[1] * stride[0])[:, None, None] + torch.arange(kernel[0])[:, None] * dilation[0]
    across = (chosen % sizes[1] * stride[1])[:, None, None] + torch.arange(kernel[1]) * dilation[1]
    vertical, across = vertical.to(value.device), across.to(value.device)
    patches = padded[:, :, vertical, across]  # samples × channels × positions × taps
    groups = groups_of(node)
    split = patches.reshape(len(value), groups, -1, *patches.shape[2:])
    return split.permute(1, 0, 3, 2, 4, 5).reshape(groups, len(value) * len(chosen), -1)


def _drawn(total: int, most: int, generator: torch.Generator) -> Tensor:
    return torch.arange(total) if total <= most else torch.randperm(total, generator=generator)[:most].sort().values


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _pair(node: Node, index: int, default: int, value: Tensor) -> tuple[int, int]:
    """An argument for two spatial dimensions; one-dimensional layers get a first one of no effect."""
    given = _argument(node, index, default)
    sizes = list(given) if isinstance(given, Sequence) else [given]
    if value.dim() == 3:
        return (default, int(sizes[0]))
    return (int(sizes[0]), int(sizes[-1]))
