"""Rows: what a layer multiplies by its weights, as matrices, on a sample of its output positions.

A convolution is one linear map applied at every output position. With the ``K = inputs of a group × taps`` values that
it reads there written as a row ``x``, its outputs are ``W x + b``, for each group of channels on its own; a linear
layer is the case of one group whose positions are all its leading dimensions. Methods that fit weights need rows, not
images, and far fewer than there are: positions are drawn by seed, the same for two inputs of one layer.

Left out on purpose: transposed convolutions, which ``reason`` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from qtool.graphs.operators import CONVOLUTIONS, aten, groups_of

_CONVOLUTIONS = CONVOLUTIONS[:3]


def reason(node: Node) -> str:
    """Why a layer cannot be written as rows; empty when it can."""
    if node.target is aten.linear.default:
        return ""
    if node.target not in _CONVOLUTIONS:
        return f"no rows of {str(node.target).removeprefix('aten.').split('.')[0]}"
    return "a padding given by name" if len(node.args) > 4 and isinstance(node.args[4], str) else ""


def rows(node: Node, weight: Tensor, value: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """The rows of ``most`` output positions of each sample (all where there are fewer): groups × rows × K, float32.

    ``value`` is the layer's input, a batch; ``weight`` gives its kernel's size; ``generator`` draws the positions.
    """
    if node.target is aten.linear.default:
        flat = value.reshape(len(value), -1, value.shape[-1])
        return flat[:, _drawn(flat.shape[1], most, generator).to(value.device)].reshape(1, -1, value.shape[-1])
    kernel, arguments = weight.shape[2:], ((3, 1), (4, 0), (5, 1))
    stride, padding, dilation = (_each(node, index, default, len(kernel)) for index, default in arguments)
    padded = functional.pad(value, [size for pads in reversed(padding) for size in (pads, pads)])
    steps = list(zip(padded.shape[2:], kernel, stride, dilation, strict=True))
    sizes = [(whole - spread * (taps - 1) - 1) // step + 1 for whole, taps, step, spread in steps]
    chosen = _drawn(math.prod(sizes), most, generator)
    first = torch.unravel_index(chosen, sizes)
    grid = torch.meshgrid(*(torch.arange(taps) * spread for _, taps, _, spread in steps), indexing="ij")
    where = torch.zeros(len(chosen), math.prod(kernel), dtype=torch.int64)  # in the flattened image: positions × taps
    for place, offset, (whole, _, step, _) in zip(first, grid, steps, strict=True):
        where = where * whole + place[:, None] * step + offset.flatten()
    patches = padded.flatten(2)[:, :, where.to(value.device)]  # samples × channels × positions × taps
    groups = groups_of(node)
    split = patches.reshape(len(value), groups, -1, *patches.shape[2:])
    return split.permute(1, 0, 3, 2, 4).reshape(groups, len(value) * len(chosen), -1)


def _drawn(total: int, most: int, generator: torch.Generator) -> Tensor:
    return torch.arange(total) if total <= most else torch.randperm(total, generator=generator)[:most].sort().values


def _each(node: Node, index: int, default: int, dimensions: int) -> list[int]:
    """An argument of a convolution for each spatial dimension."""
    given = node.args[index] if len(node.args) > index else default
    sizes = [int(str(size)) for size in given] if isinstance(given, Sequence) else [int(str(given))]
    return sizes if len(sizes) == dimensions else sizes * dimensions
