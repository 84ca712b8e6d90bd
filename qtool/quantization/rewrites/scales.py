"""Products and sums with stored numbers behind a layer, folded into its weights: layer scale, gains, temperatures.

    (W x + b) · γ + β = (γ W) x + (γ b + β),    γ and β one number for each output channel, or one for all

ConvNeXt, CaiT and many after them scale so what a block adds to its input (layer scale, arXiv 2103.17239), networks
without normalisation what a convolution gives; a batch-norm that a model writes out (detectors freeze theirs so) does
both. No target has an integer kernel for it, and so the convolution behind which it stands and the sum behind it would
end in float. They may stand behind what only moves numbers, and a product behind ReLU and pooling where γ > 0. Where
batch-norm trains in between, its γ and β take factor and summand. What a layer gives is negated where it is taken away
from something, and added. A number below 0 that is added to all channels behind ReLU (the affine of HGNetV2 and
PP-LCNet) goes through it too, and is its bound then:

    max(W x + b, 0) + β = max(W x + b + β, β),    β ≤ 0

since a range that holds 0 clips there as well. Of β > 0 it would not, and the sum stays.

A batch-norm behind such a ReLU is a factor and a sum. The factor's size goes into the layer as well, and its sign
stays (:func:`fold_size`): between the two, channels are then as even as the batch-norm makes them, which one range for
all of them needs. (The engine torch.ao, which prepares the model's own modules, does without.)

What cannot be folded so, stays (see :func:`write_affines`). Left out on purpose: weights that something else reads
too, which would be stored twice.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, parameter, set_parameter, store_before
from qtool.graphs.operators import CONVOLUTIONS, DROPOUTS, aten
from qtool.quantization.rewrites.norms import NORMAL, readers_of, scaled

_LAYERS = (*CONVOLUTIONS, aten.linear.default, aten.batch_norm.default)
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_DIFFERENCES: dict[Any, tuple[int, int]] = {aten.sub.Tensor: (0, 1), aten.rsub.Scalar: (1, 0)}
"""Where a difference has what is taken from, and what is taken away."""
_VIEWS = (aten.reshape.default, aten.flatten.using_ints)
_SAME = (aten.contiguous.default, aten.clone.default, *DROPOUTS)
_POOLS = (aten.max_pool2d.default, aten.adaptive_avg_pool2d.default)
_CLIPS = (aten.relu.default, aten.leaky_relu.default, *_POOLS)
_SHAPED = (*_VIEWS, *_SAME, aten.permute.default, aten.transpose.int, aten.unsqueeze.default)


def fold_scales(graph_module: GraphModule) -> list[Node]:
    """Folds in place each product and sum of what a layer alone gives with stored numbers; returns these layers.

    What such a layer gives is never taken away but added.
    """
    readers = readers_of(graph_module)
    wanted = (*_PRODUCTS, *_SUMS, *_DIFFERENCES)
    found = [node for node in graph_module.graph.nodes if node.target in wanted and not node.kwargs]
    layers = [rule(graph_module, readers, node) for rule in (_negate, _fold) for node in found]
    folded = [layer for layer in layers if layer is not None]
    if folded:
        clean(graph_module)
    return folded


def fold_size(graph_module: GraphModule, source: Node, factor: Tensor) -> Tensor:
    """What is left of a factor of each channel of ``source`` after its size is folded into a layer, if it can be.

    Right behind the layer it is left to ``norms.fold_batch_norm``, which folds it whole.
    """
    layer, axis, clips = _layer(source)
    readers = readers_of(graph_module)
    if layer is None or axis != 1 or not clips or not _is_own(layer, readers):
        return factor
    _scale(graph_module, layer, factor.abs().where(factor != 0, torch.ones_like(factor)))
    return factor.sign()


def _negate(graph_module: GraphModule, readers: Mapping[str, int], node: Node) -> Node | None:
    """Makes a sum of a difference, where a layer gives what is taken away: x − (W y + b) = x + (−W) y − b."""
    if node.target not in _DIFFERENCES or len(node.args) > 2:
        return None
    kept, source = (node.args[place] for place in _DIFFERENCES[node.target])
    layer, _, clips = _layer(source) if isinstance(source, Node) else (None, None, [])
    if layer is None or clips or not _is_own(layer, readers):
        return None
    _scale(graph_module, layer, -torch.ones(1, dtype=torch.float64))
    node.target, node.args = aten.add.Tensor, (kept, source) if isinstance(kept, Node) else (source, kept)
    return layer


def _is_own(layer: Node, readers: Mapping[str, int]) -> bool:
    """Whether nothing else reads the weights of a layer."""
    return all(readers.get(str(value.target), 1) == 1 for value in _stored_of(layer))


def _fold(graph_module: GraphModule, readers: Mapping[str, int], node: Node) -> Node | None:
    if node.target not in (*_PRODUCTS, *_SUMS):
        return None
    pairs = (node.args[:2], node.args[1::-1])[: 1 if node.target in (aten.div.Tensor, aten.sub.Tensor) else 2]
    for source, given in pairs:
        if not isinstance(source, Node) or not isinstance(source.meta["val"], Tensor):  # an open size is a node too
            continue
        if _sizes(source) != _sizes(node):
            continue
        layer, axis, clips = _layer(source)
        numbers = stored_numbers(graph_module, given, source.meta["val"], axis)
        if layer is None or numbers is None or not _is_own(layer, readers):
            continue
        if node.target in _SUMS:
            numbers = numbers if node.target is aten.add.Tensor else -numbers
            if clips and not _shift_bound(clips, numbers):
                continue
            _shift(graph_module, layer, numbers)
        elif clips and not bool((numbers > 0).all()):
            continue
        else:
            _scale(graph_module, layer, numbers if node.target is aten.mul.Tensor else 1 / numbers)
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
        return layer
    return None


def _layer(node: Node) -> tuple[Node | None, int | None, list[Node]]:
    """The layer whose results alone ``node`` holds, the axis of its channels there, and what clips or pools in between.

    The axis is None where it is split.
    """
    if len(node.users) != 1:
        return None, None, []
    if node.target in _LAYERS:
        plain = isinstance(node.args[1], Node) and all(value.op == "get_attr" for value in _stored_of(node))
        return (node if plain else None), node.meta["val"].dim() - 1 if node.target is aten.linear.default else 1, []
    source = node.args[0] if node.target in (*_SHAPED, *_CLIPS) else None
    layer, axis, clips = _layer(source) if isinstance(source, Node) else (None, None, [])
    return layer, None if axis is None else _moved(node, axis), [*clips, node] if node.target in _CLIPS else clips


def _shift_bound(clips: list[Node], numbers: Tensor) -> bool:
    """Has a ReLU clip at what is added behind it instead; False where that is no one number for all, or above 0.

    Pools give what is added to all that they read.
    """
    relus, number = [node for node in clips if node.target not in _POOLS], float(numbers[0])
    if not relus:
        return True
    if number > 0 or bool((numbers != number).any()) or any(node.target is not aten.relu.default for node in relus):
        return False
    for node in relus if number else ():
        node.target, node.args = aten.clamp.default, (node.args[0], number, None)
    return True


def _stored_of(layer: Node) -> list[Node]:
    """Weight and bias of a layer, as far as it has them."""
    return [value for value in layer.args[1:3] if isinstance(value, Node)]


def _moved(node: Node, axis: int) -> int | None:
    """Where an axis of the input of a move is in its output; None where it is split or joined with others."""
    source, after = node.args[0], int(node.meta["val"].dim())
    assert isinstance(source, Node)
    if node.target in (*_SAME, *_CLIPS):
        return None if node.target in _POOLS and axis >= after - 2 else axis  # which is pooled over
    if node.target is aten.permute.default:
        return [int(str(place)) % after for place in node.args[1]].index(axis)  # type: ignore[union-attr]
    if node.target is aten.transpose.int:
        one, other = (int(str(place)) % after for place in node.args[1:3])
        return {one: other, other: one}.get(axis, axis)
    before, now = _sizes(source), _sizes(node)
    if node.target in _VIEWS and before[: axis + 1] == now[: axis + 1]:
        return axis
    if node.target in _VIEWS and axis == len(before) - 1 and before[-1] == now[-1]:
        return len(now) - 1
    return None


def _sizes(node: Node) -> list[str]:
    """Sizes as text: to compare one that is not fixed would fix it."""
    return [str(size) for size in node.meta["val"].shape]


def stored_numbers(graph_module: GraphModule, factor: Any, value: Tensor, axis: int | None) -> Tensor | None:
    """Numbers in float64, one for each index of an axis of ``value`` or one for all; None where they are no such.

    They are given as a number or a node, and None where they are computed.
    """
    if isinstance(factor, int | float):
        return torch.tensor([float(factor)], dtype=torch.float64)
    stored = _stored(graph_module, factor)
    if stored is None or stored.dtype != torch.float32 or stored.dim() > value.dim():
        return None
    sizes = [1] * (value.dim() - stored.dim()) + list(stored.shape)
    alone = all(size == 1 for place, size in enumerate(sizes) if place != axis)
    return stored.double().reshape(-1) if alone else None


def _stored(graph_module: GraphModule, node: Any) -> Tensor | None:
    """A stored tensor, reshaped or turned on the way or not."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        return parameter(graph_module, node)
    source = _stored(graph_module, node.args[0]) if node.target in _SHAPED and node.args else None
    return None if source is None else node.target(source, *node.args[1:])  # type: ignore[operator]


def _scale(graph_module: GraphModule, layer: Node, numbers: Tensor) -> None:
    """Multiplies in place what a layer gives by one number for each channel, or one for all."""
    channels = layer.meta["val"].shape[-1 if layer.target is aten.linear.default else 1]
    numbers = numbers.expand(channels)
    for node in _stored_of(layer):
        path = str(node.target)
        old = operator.attrgetter(path)(graph_module)
        new = scaled(old.detach(), numbers, layer) if old.dim() > 1 else old.detach().double() * numbers
        set_parameter(graph_module, path, new.to(old.dtype), like=path)
    if NORMAL in layer.meta:
        mean, deviation = layer.meta[NORMAL]
        layer.meta[NORMAL] = (mean * numbers.to(mean.dtype), deviation * numbers.abs().to(mean.dtype))


def _shift(graph_module: GraphModule, layer: Node, numbers: Tensor) -> None:
    """Adds in place one number for each channel, or one for all, to what a layer gives."""
    weight, *biases = _stored_of(layer)
    numbers = numbers.expand(layer.meta["val"].shape[-1 if layer.target is aten.linear.default else 1])
    if biases:
        path = str(biases[0].target)
        old = operator.attrgetter(path)(graph_module).detach()
        set_parameter(graph_module, path, (old.double() + numbers).to(old.dtype), like=path)
    else:
        path, like = f"{weight.target}_shift", str(weight.target)
        made = store_before(graph_module, layer, path, numbers.float().contiguous(), like=like)
        layer.args = (*layer.args[:2], made, *layer.args[3:])
    if NORMAL in layer.meta:
        mean, deviation = layer.meta[NORMAL]
        layer.meta[NORMAL] = (mean + numbers.to(mean.dtype), deviation)
