"""Parallel branches that are one convolution: RepVGG, MobileOne and what trains like them.

A convolution is linear in its weights, and so is a sum of several of the same input:

    conv(x; W, b) ± conv(x; V, c) = conv(x; W ± V', b ± c),    V' the kernel V among zeros of W's size

(arXiv 2101.03697). A batch-norm of the input is a kernel that is a diagonal at its centre, and the input itself the
unit matrix there. Models that are to run so have a method that merges them. Where nobody called it, it is done here, in
the float reference too, as batch-norm is folded: one rounding instead of one for each branch and each sum, and a
fraction of the time.

The input itself is merged only where a batch-norm reads the sum, which is how such blocks end: elsewhere it is the
residual connection, which the weights' 8 bits should not have to hold. A network that trains goes on merged, with the
statistics that the branches' batch-norms had. Left out on purpose: kernels of which none contains the other, and
weights that something else reads too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, parameter, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten, by_axis
from qtool.quantization.rewrites.norms import NORMAL, Copies, coefficients, fold_batch_norm, fold_into

_CONVOLUTIONS = CONVOLUTIONS[:3]
_SIGNS: dict[Any, int] = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


def merge_branches(graph_module: GraphModule, *, train: bool = False) -> list[Node]:
    """Makes one convolution of sums of convolutions, in place; returns what is left of them.

    A batch-norm behind such a convolution is folded, unless it is to ``train``.
    """
    merging = _Merging(graph_module)
    merged = [node for total in list(graph_module.graph.nodes) if (node := merging.merge(total)) is not None]
    if merged:
        clean(graph_module)
    if merged and not train:
        fold_batch_norm(graph_module)
    return [node for node in dict.fromkeys(merged) if node.users]


@dataclass(frozen=True)
class _Geometry:
    """A convolution's kernel, stride, padding and dilation by axis, and its groups."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def contains(self, other: _Geometry) -> bool:
        """Whether the other's kernel lies within this one, both of one centre."""
        sizes = list(zip(self.kernel, other.kernel, strict=True))
        starts = self.starts(other)
        centred = all(large - small == 2 * start for (large, small), start in zip(sizes, starts, strict=True))
        same = self.stride == other.stride and self.groups == other.groups and min(starts) >= 0
        reach = [d for d, k in zip(other.dilation, other.kernel, strict=True) if k > 1]
        plain = set(self.dilation + reach) == {1} or (self.kernel, self.dilation) == (other.kernel, other.dilation)
        return centred and same and plain

    def starts(self, other: _Geometry) -> list[int]:
        """Where the other's kernel begins in this one."""
        return [large - small for large, small in zip(self.padding, other.padding, strict=True)]

    @property
    def centred(self) -> bool:
        """Whether each result stands where the centre of the kernel was, and the kernel has a number there."""
        axes = zip(self.padding, self.dilation, self.kernel, strict=True)
        return set(self.stride) == {1} and all(k % 2 == 1 and 2 * p == d * (k - 1) for p, d, k in axes)


class _Merging:
    """One graph, and how often its stored tensors are read."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module, self.copies = graph_module, Copies(graph_module)

    def merge(self, total: Node) -> Node | None:
        """The convolution that a sum has become; None where it is none, or stays."""
        if total.target not in _SIGNS or total.kwargs:
            return None
        bases: list[Any] = [self._below_norm(value, total) for value in total.args[:2]]
        sign = _SIGNS[total.target]
        for (wide, narrow), signs in ((bases, (1, sign)), (bases[::-1], (sign, 1))):
            if wide is narrow or not self._is_own(wide) or self._as_kernel(narrow, wide, total) is None:
                continue
            trains = operator.attrgetter(str(wide.args[1].target))(self.graph_module).requires_grad
            for base, value in zip(bases, total.args[:2], strict=True):
                if base is not value:
                    fold_into(self.copies, base, value)  # type: ignore[arg-type]
            self._combine(wide, signs, *self._as_kernel(narrow, wide, total))  # type: ignore[misc]
            for value in wide.args[1:3]:
                self.graph_module.get_parameter(str(value.target)).requires_grad_(trains)
            total.replace_all_uses_with(wide)
            total.graph.erase_node(total)
            return wide  # type: ignore[no-any-return]
        return None

    def _below_norm(self, value: Any, total: Node) -> Any:
        """The convolution under a batch-norm that only the sum reads; anything else as it is."""
        under = value.args[0] if isinstance(value, Node) and value.target is aten.batch_norm.default else None
        alone = under is not None and list(value.users) == [total] and self._is_own(under)
        return under if alone and _has_statistics(value) else value

    def _is_own(self, node: Any) -> bool:
        """Whether it is a convolution that is read once, of weights that nothing else reads."""
        if not isinstance(node, Node) or node.target not in _CONVOLUTIONS or len(node.users) != 1:
            return False
        stored = [value for value in node.args[1:3] if isinstance(value, Node)]
        return all(value.op == "get_attr" and self.copies.readers.get(str(value.target), 1) == 1 for value in stored)

    def _as_kernel(self, narrow: Any, wide: Node, total: Node) -> tuple[Tensor, Tensor] | None:
        """What ``narrow`` computes, as a kernel and a bias for ``wide`` in float64; None where it is no such thing."""
        source = wide.args[0]
        if narrow is source:
            if [user.target for user in total.users] != [aten.batch_norm.default]:
                return None
            ones = torch.ones(wide.meta["val"].shape[1], dtype=torch.float64)
            return self._diagonal(wide, ones, 0 * ones)
        if not isinstance(narrow, Node) or narrow.args[:1] != (source,) or len(narrow.users) != 1:
            return None
        if narrow.target is wide.target and self._is_own(narrow):
            return self._placed(narrow, wide)
        if narrow.target is aten.batch_norm.default and _has_statistics(narrow):
            return self._diagonal(wide, *coefficients(self.graph_module, narrow))
        return None

    def _placed(self, narrow: Node, wide: Node) -> tuple[Tensor, Tensor] | None:
        """The kernel of a convolution among zeros, where the other's contains it."""
        (large, whole, _), (small, weight, bias) = self._read(wide), self._read(narrow)
        if not large.contains(small) or weight.shape[:2] != whole.shape[:2]:
            return None
        kernel = torch.zeros_like(whole)
        inner = kernel
        for axis, (start, size) in enumerate(zip(large.starts(small), small.kernel, strict=True), 2):
            inner = inner.narrow(axis, start, size)
        inner.copy_(weight)
        return kernel, torch.zeros_like(whole[:, 0].flatten(1)[:, 0]) if bias is None else bias

    def _diagonal(self, wide: Node, factor: Tensor, shift: Tensor) -> tuple[Tensor, Tensor] | None:
        """``factor`` · x + ``shift``, one of each per channel, as a diagonal at the centre of a kernel."""
        large, whole, _ = self._read(wide)
        if not large.centred or whole.shape[0] != whole.shape[1] * large.groups:
            return None
        kernel, channels = torch.zeros_like(whole), torch.arange(len(whole))
        taps = kernel.flatten(2)
        taps[channels, channels % whole.shape[1], taps.shape[2] // 2] = factor
        return kernel, shift

    def _read(self, conv: Node) -> tuple[_Geometry, Tensor, Tensor | None]:
        """A convolution's geometry, and its weight and bias in float64."""
        weight, bias = (parameter(self.graph_module, value) for value in (*conv.args[1:3], None)[:2])
        assert weight is not None
        rank = weight.dim() - 2
        given: list[Any] = [*conv.args[3:7], *[1, 0, 1, 1][len(conv.args[3:7]) :]]
        stride, padding, dilation = (by_axis(value, rank) for value in given[:3])
        geometry = _Geometry(list(weight.shape[2:]), stride, padding, dilation, int(given[3]))
        return geometry, weight.double(), None if bias is None else bias.double()

    def _combine(self, wide: Node, signs: tuple[int, int], kernel: Tensor, shift: Tensor) -> None:
        _, weight, bias = self._read(wide)
        stored, old = (*wide.args[1:3], None)[:2]
        path = str(stored.target)  # type: ignore[union-attr]
        place = str(old.target) if isinstance(old, Node) else f"{path}_bias"
        set_parameter(self.graph_module, path, (signs[0] * weight + signs[1] * kernel).float())
        set_parameter(self.graph_module, place, (signs[1] * shift + (0 if bias is None else signs[0] * bias)).float())
        if bias is None:
            with wide.graph.inserting_before(wide):
                made = wide.graph.get_attr(place)
            made.meta["val"] = wide.meta["val"].new_empty([len(shift)])
            wide.args = (*wide.args[:2], made, *wide.args[3:])
        wide.meta.pop(NORMAL, None)


def _has_statistics(norm: Node) -> bool:
    return all(isinstance(value, Node) and value.op == "get_attr" for value in norm.args[3:5])
