"""Transposed convolutions as convolutions whose channels are then laid out as pixels, for runtimes' integer kernels.

A transposed convolution of stride s computes s results for each place of its input, each from taps of its own:

    y[s·q + r − p] = Σ_t W[s·t + r] x[q − t],        r = 0 … s − 1

so it is a convolution with s times the channels (s² for images), one for each phase r, and a shuffle that moves numbers
(the sub-pixel convolution of arXiv 1609.05158 and 1609.07009). No runtime here convolves integers transposed, each has
the convolution and the shuffle: the layer's weights shrink to bytes and its products run in integers. Where s divides
the kernel, as in 2×2 and 4×4 with stride 2, there are as many products as before but at the edge; otherwise phases with
fewer taps are filled up with zeros, 16 for 9 in a 3×3 of stride 2.

The float reference and baseline keep the layer as it is. Left out on purpose: groups, whose many small convolutions are
slow in integers; dilation; and in training kernels that zeros would be filled into, since training would move them. A
batch-norm behind is folded before training, whatever others do: between the convolution and the shuffle it would see
the phases and not the channels, and behind both it would keep the layer in float.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qtool.graphs.edits import clean, parameter, set_parameter
from qtool.graphs.operators import aten, by_axis
from qtool.quantization.rewrites.norms import fold_batch_norm
from qtool.quantization.rewrites.shuffles import call, channels_first, rows, stays_float
from qtool.quantization.targets.base import POINTWISE

_PLAIN = {
    aten.conv_transpose1d.default: aten.conv1d.default,
    aten.conv_transpose2d.input: aten.conv2d.default,
    aten.conv_transpose3d.input: aten.conv3d.default,
}


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution: its sizes, and those of the convolution that stands for it.

    The first result of phase 0 reads tap ``first``: the padding where that needs no more taps, else 0.
    """

    size: int
    kernel: int
    stride: int
    padding: int
    output_padding: int

    @property
    def result(self) -> int:
        """The size of the result, which may be open as that of the input is."""
        return self.size * self.stride + self._more

    @property
    def _more(self) -> int:
        return self.kernel + self.output_padding - 2 * self.padding - self.stride

    @property
    def first(self) -> int:
        """The tap of the kernel that phase 0 begins with."""
        aligned = self.padding % self.stride
        return aligned if self._taps(aligned) == self._taps(0) else 0

    def _taps(self, first: int) -> int:
        return (self.kernel - 1 - first) // self.stride + (2 if first else 1)

    @property
    def taps(self) -> int:
        """The size of the convolution's kernel."""
        return self._taps(self.first)

    @property
    def behind(self) -> int:
        """Of these, the taps that read what lies behind a place, one where phase 0 does not begin with the first."""
        return 1 if self.first else 0

    @property
    def skipped(self) -> int:
        """Places whose results would all be cut off, as far as the padding in front of them goes."""
        return min((self.padding - self.first) // self.stride, self.taps - 1 - self.behind)

    @property
    def pads(self) -> tuple[int, int]:
        """Zeros before and behind the input."""
        last = (self.kernel + self.output_padding - self.padding - self.first - 1) // self.stride
        return self.taps - 1 - self.behind - self.skipped, max(last + self.behind, 0)

    @property
    def places(self) -> int:
        """The size of the convolution's result."""
        return self.size + self._more_places

    @property
    def _more_places(self) -> int:
        return sum(self.pads) - self.taps + 1

    @property
    def cut(self) -> tuple[int, int]:
        """Results before the first and behind the last that is wanted, however many there are between."""
        before = self.padding - self.first - self.skipped * self.stride
        return before, self._more_places * self.stride - before - self._more

    @property
    def zeros(self) -> tuple[int, int]:
        """Taps of zeros before and behind the kernel, so that each phase has as many."""
        before = self.stride * self.behind - self.first
        return before, self.taps * self.stride - self.kernel - before


def write_transposed(graph_module: GraphModule, overrides: Mapping[str, str], *, train: bool = False) -> int:
    """Rewrites transposed convolutions in place, but those that ``overrides`` leave in float; returns how many.

    ``train``: the graph is going to be trained.
    """
    written: dict[Any, list[str]] = {}
    changed = 0

    def axes_of(node: Node) -> list[Axis] | None:
        axes = None if stays_float(node, overrides) else _axes(graph_module, node)
        return None if axes is None or (train and any(any(axis.zeros) for axis in axes)) else axes

    if train:
        _fold_norms(graph_module, lambda anchor: axes_of(anchor) is not None)
    for node in list(graph_module.graph.nodes):
        if (axes := axes_of(node)) is not None:
            _rewrite(graph_module, node, axes, written)
            changed += 1
    if changed:
        clean(graph_module)
    return changed


def _fold_norms(graph_module: GraphModule, rewritten: Callable[[Node], bool]) -> None:
    """Folds the batch-norms behind what is going to be ``rewritten`` into weights that train as they did."""
    trains: dict[Node, bool] = {}

    def wanted(anchor: Node) -> bool:
        if found := rewritten(anchor):
            trains[anchor] = any(each.requires_grad for each in _parameters(graph_module, anchor))
        return found

    for anchor in fold_batch_norm(graph_module, wanted):
        for each in _parameters(graph_module, anchor):
            each.requires_grad_(trains[anchor])


def _parameters(graph_module: GraphModule, anchor: Node) -> list[nn.Parameter]:
    """The stored weight and bias of a layer."""
    return [graph_module.get_parameter(str(value.target)) for value in anchor.args[1:3] if isinstance(value, Node)]


def _axes(graph_module: GraphModule, node: Node) -> list[Axis] | None:
    """The axes of a transposed convolution that is rewritten; None of any other operator."""
    if node.target not in _PLAIN or node.kwargs or not all(_is_stored(value) for value in node.args[1:3]):
        return None
    weight = parameter(graph_module, node.args[1])
    assert weight is not None
    rank = weight.dim() - 2
    given: list[Any] = [*node.args[3:8], *[1, 0, 0, 1, 1][len(node.args[3:8]) :]]
    groups = given.pop(3)
    stride, padding, more, dilation = (by_axis(value, rank) for value in given)
    sizes = list(node.args[0].meta["val"].shape[2:])  # type: ignore[union-attr]
    if groups != 1 or set(dilation) != {1}:
        return None
    kernel = list(weight.shape[2:])
    for i in (i for i, size in enumerate(sizes) if isinstance(size, int) and size == 1):
        # a single place has no next: all results are its phases
        stride[i] = kernel[i] + more[i]
    return [Axis(*sides) for sides in zip(sizes, kernel, stride, padding, more, strict=True)]


def _is_stored(value: Any) -> bool:
    return value is None or (isinstance(value, Node) and value.op == "get_attr")


def _rewrite(graph_module: GraphModule, node: Node, axes: list[Axis], written: dict[Any, list[str]]) -> None:
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, Node)
    strides = [axis.stride for axis in axes]
    outer = [value.shape[0], value.shape[1] * math.prod(strides)]
    stored, activation = _stored(graph_module, node, axes, written), _activation(node)
    with node.graph.inserting_before(node):
        last, padding = source, [axis.pads[0] for axis in axes]
        if any(before != behind for before, behind in (axis.pads for axis in axes)):
            around = [amount for axis in reversed(axes) for amount in axis.pads]
            padded = [axis.size + sum(axis.pads) for axis in axes]
            last = call(node, aten.constant_pad_nd.default, (source, around), [*source.meta["val"].shape[:2], *padded])
            padding = [0] * len(axes)
        arguments = (last, *stored, [1] * len(axes), padding)
        plain: Any = _PLAIN[node.target]  # type: ignore[index]
        last = call(node, plain, arguments, [*outer, *(axis.places for axis in axes)])
        if activation is not None:
            last = call(node, activation.target, (last, *activation.args[1:]), last.meta["val"].shape)
        last = _laid_out(node, last, axes)
    (activation or node).replace_all_uses_with(last)


def _activation(node: Node) -> Node | None:
    """What is computed of each of its numbers alone, and so as well before they are laid out, by which it fuses."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    plain = user is not None and user.target in POINTWISE and user.args[0] is node and not user.kwargs
    return user if plain else None


def _laid_out(node: Node, phases: Node, axes: list[Axis]) -> Node:
    """The channels of each phase as the pixels that they are, and of these those that are wanted."""
    if math.prod(axis.stride for axis in axes) == 1:
        return _cut(node, phases, axes, 2)
    if _is_pixel_shuffle(axes):
        (stride, _), (batch, channels, *_) = (axis.stride for axis in axes), phases.meta["val"].shape
        shape = [batch, channels // stride**2, *(axis.places * stride for axis in axes)]
        return _cut(node, call(node, aten.pixel_shuffle.default, (phases, stride), shape), axes, 2)
    return channels_first(node, _cut(node, rows(node, phases, [axis.stride for axis in axes]), axes, 1))


def _is_pixel_shuffle(axes: list[Axis]) -> bool:
    """Whether there is an operator for it, which takes a channel's phases from one after the other."""
    return len(axes) == 2 and axes[0].stride == axes[1].stride


def _cut(node: Node, last: Node, axes: list[Axis], first: int) -> Node:
    """The results that are wanted of each axis, the first of which is the dimension ``first``."""
    for index, axis in enumerate(axes, first):
        before, behind = axis.cut
        if before or behind:
            sizes, end = list(last.meta["val"].shape), -behind if behind else sys.maxsize
            cut = (last, index, before, end)
            last = call(node, aten.slice.Tensor, cut, [*sizes[:index], axis.result, *sizes[index + 1 :]])
    return last


def _stored(
    graph_module: GraphModule, node: Node, axes: list[Axis], written: dict[Any, list[str]]
) -> list[Node | None]:
    """The convolution's weight and bias, stored once for all layers that share them."""
    given = (*node.args[1:3], None)[:2]
    key = (*(str(getattr(value, "target", "")) for value in given), *((a.stride, a.first, a.taps) for a in axes))
    if key not in written:
        written[key] = [f"{value.target}_phases{len(written)}" if isinstance(value, Node) else "" for value in given]
        for name, value in zip(written[key], given, strict=True):
            if (old := parameter(graph_module, value)) is not None:
                made = phases(old, axes) if old.dim() > 1 else _repeated(old, axes)
                set_parameter(graph_module, name, made, like=str(value.target))  # type: ignore[union-attr]
    with node.graph.inserting_before(node):
        nodes = [node.graph.get_attr(name) if name else None for name in written[key]]
    for stored in nodes:
        if stored is not None:
            stored.meta["val"] = parameter(graph_module, stored)
    return nodes


def _repeated(bias: Tensor, axes: list[Axis]) -> Tensor:
    """A bias for each phase of each output, in the order of ``phases``."""
    count = math.prod(axis.stride for axis in axes)
    return bias.repeat_interleave(count) if _is_pixel_shuffle(axes) else bias.repeat(count)


def phases(weight: Tensor, axes: list[Axis]) -> Tensor:
    """Inputs × outputs × taps of a transposed convolution as N × inputs × taps of the plain one.

    N are the phases of one output after the other where a pixel shuffle reads them, else the outputs of one phase.
    """
    rank = len(axes)
    padded = F.pad(weight, [amount for axis in reversed(axes) for amount in axis.zeros])
    apart = padded.reshape(*weight.shape[:2], *(size for axis in axes for size in (axis.taps, axis.stride)))
    taps, steps = [2 + 2 * i for i in range(rank)], [3 + 2 * i for i in range(rank)]
    order = (1, *steps) if _is_pixel_shuffle(axes) else (*steps, 1)
    turned = apart.flip(taps).permute(*order, 0, *taps)
    return turned.reshape(-1, weight.shape[0], *(axis.taps for axis in axes)).contiguous()
