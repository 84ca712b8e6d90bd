"""Pairs: 8-bit weights that no x86 CPU saturates, by an order of channels in which their pairs fit.

Without VNNI the sum of two products of bytes has 16 bits (``pair_sums.py``), so that two large weights of one sign must
not be neighbours. Which channels are is free: a network computes the same if what writes a path of channels, and all
that reads it, puts them into another order, as with equalization's scales. Wanted is a perfect matching of the channels
``i, j`` that keeps the steps of the readers' outputs ``o`` small, i.e. the largest sum of a pair of each:

    min Σ_(i,j) Σ_o a_o² [ e^(β(w⁺_oi + w⁺_oj)/a_o) + e^(β(w⁻_oi + w⁻_oj)/a_o) ],   a_o = max_i |w_oi|,

w⁺ and w⁻ the magnitudes of either sign. The exponential makes the largest count, and a product of two matrices gives
the costs of all pairs. The matching is greedy, the dearest channels first, then improved by exchanging partners. With
fewer outputs than inputs there is mostly one in which no step has to be wider, where neighbours as they come cost 1.7
dB of the weights' precision and 7 bits 6 dB.

What a path cannot give, or where it has to keep its order, wider steps do; every later pass stays within
(``store_integers``), and quantization-aware training with it. Where that lets batch-norms live, which are not folded
yet, it keeps the order that there is; LSTMs keep theirs too (``storage.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.errors import UsageError
from qtool.graphs.edits import parameter, set_parameter
from qtool.graphs.operators import groups_of
from qtool.quantization.algorithms.streams import ANCHORS, Stream, find_streams
from qtool.quantization.algorithms.subject import NothingToDo, Subject, saved_numbers
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.quantizers.pair_sums import PAIRED, is_depthwise, least_ends
from qtool.quantization.rewrites.norms import NORMAL, readers_of
from qtool.quantization.storage import QMAX, is_integer_lstm, lstm_qmax
from qtool.units import many

MOST_CHANNELS = 2048
"""That are matched with each other, which bounds the memory of their costs; of more, so many at a time."""
_BETA = 10.0
_SWEEPS = 6
_GAIN = 1e-3


def order_pairs(subject: Subject) -> None:
    """Reorders channels and marks the layers whose integers are to fit, in place; notes of how many."""
    layers = _marked(subject)
    moved = 0
    paths = {path[0].producers[0].name: path for path in _paths(subject.graph)}
    for name, order in _orders(subject, paths, set(layers)):
        _reorder(subject.graph, paths[name], order.to(subject.device))
        subject.ranges.setdefault(name, {})["pairs"] = order.tolist()
        moved += 1
    subject.graph.recompile()
    subject.note(f"pairs: {_fit(layers)}, {many(moved, 'path')} of channels in another order for it")


def keep_pairs(subject: Subject) -> None:
    """Marks the layers of a graph whose batch-norms will live: steps are as wide as the order that they have needs."""
    subject.note(f"pairs: {_fit(_marked(subject))}, which training keeps to")


def _marked(subject: Subject) -> list[Node]:
    """The layers whose integers are to fit, marked so. Raises NothingToDo where there are none."""
    at_risk = [placed.anchor for placed in subject.placement.layers if _is_at_risk(placed, subject)]
    readers, counts = readers_of(subject.graph), Counter(map(_stored, at_risk))
    layers = [node for node in at_risk if counts[_stored(node)] == readers[_stored(node)]]  # else a table shares bytes
    lstms = _lstms(subject.placement)
    if not layers + lstms:
        raise NothingToDo("no product of two weights is added in 16 bits")
    for layer in layers:
        layer.meta[PAIRED] = groups_of(layer)
    for lstm in lstms:
        lstm.meta[PAIRED] = 1
    return layers + lstms


def _lstms(placement: Placement) -> list[Node]:
    """Those whose integers of 8 bits the target multiplies by bytes. Their states keep the order that they have."""
    if not placement.target.adds_pairs or lstm_qmax(placement) != QMAX:
        return []
    stored = (p.anchor for p in placement.placed if p.pattern is not None and p.pattern.stored)
    return [node for node in stored if is_integer_lstm(node, placement)]


def _fit(layers: list[Node]) -> str:
    return f"the weights of {many(len(layers), 'layer')} fit sums of 16 bits"


def _orders(subject: Subject, paths: dict[str, list[Stream]], layers: set[Node]) -> Iterator[tuple[str, Tensor]]:
    """The order of each path that gets another: the best that is found, or what was saved where ranges are repeated."""
    if subject.config.ranges_from is None:
        for name, path in paths.items():
            if (order := _best_order(subject.graph, path, layers)) is not None:
                yield name, order
        return
    for name, numbers in subject.saved("pairs", paths).items():
        order = saved_numbers("pairs", name, numbers, paths[name][0].num_channels).long()
        if not torch.equal(order.sort().values, torch.arange(len(order))):
            raise UsageError(
                "--ranges-from", f"an order of the {len(order)} channels at '{name}'", "a channel twice",
                "use the ranges of the same model, or calibrate anew",
            )  # fmt: skip
        yield name, order


def _is_at_risk(placed: Placed, subject: Subject) -> bool:
    """Whether the target multiplies a layer's weights of 8 bits by bytes."""
    form = subject.placement.weight_format(placed)
    paired = subject.placement.target.adds_pairs and placed.unit.integer and form.qmax == -form.qmin == 127
    weight = parameter(subject.graph, placed.anchor.args[1]) if placed.anchor.target in ANCHORS else None
    return paired and weight is not None and not is_depthwise(weight, groups_of(placed.anchor))


def _paths(graph: GraphModule) -> list[list[Stream]]:
    """Streams that keep one order: those on both sides of a depthwise convolution do, and only whole ones are given."""
    streams = find_streams(graph, scaled=False)
    made = {producer: stream for stream in streams for producer in stream.producers}
    path = {stream: [stream] for stream in streams}
    for stream in streams:
        for reader in filter(lambda node: _is_depthwise(graph, node), stream.consumers):
            first, second = path[stream], path[made[reader]]
            if first is not second:
                first += second
                path |= dict.fromkeys(second, first)
    return [found for key, found in path.items() if found[0] is key and _is_free(graph, found)]


def _is_free(graph: GraphModule, path: list[Stream]) -> bool:
    """Whether nothing but whole layers writes and reads the channels of a path."""
    if any(stream.blocked for stream in path) or path[0].num_channels % 2:
        return False
    readers = {node for stream in path for node in stream.consumers}
    layers = readers.union(*(stream.producers for stream in path))
    return all(layer in readers if _is_depthwise(graph, layer) else groups_of(layer) == 1 for layer in layers)


def _is_depthwise(graph: GraphModule, layer: Node) -> bool:
    weight = parameter(graph, layer.args[1])
    return weight is not None and is_depthwise(weight, groups_of(layer))


def _mixing(graph: GraphModule, path: list[Stream]) -> list[Node]:
    """The layers that add up products of a path's channels."""
    readers = dict.fromkeys(node for stream in path for node in stream.consumers)
    return [node for node in readers if not _is_depthwise(graph, node)]


@torch.no_grad()
def _best_order(graph: GraphModule, path: list[Stream], layers: set[Node]) -> Tensor | None:
    """The best order of a path's channels for its readers that was found; None where they have that."""
    weights = [_weight(graph, node) for node in _mixing(graph, path) if node in layers]
    if not weights:
        return None
    order = torch.cat([
        start + matched(costs(weight[:, start : start + MOST_CHANNELS] for weight in weights))
        for start in range(0, path[0].num_channels, MOST_CHANNELS)
    ])  # fmt: skip
    noise = sum(_noise(weight[:, order.to(weight.device)]) for weight in weights)
    return order if noise < (1 - _GAIN) * sum(map(_noise, weights)) else None


@torch.no_grad()
def _reorder(graph: GraphModule, path: list[Stream], order: Tensor) -> None:
    """Puts the channels of a path into another order where they are made and where they are read, in place."""
    mixing = _mixing(graph, path)
    for node in dict.fromkeys(producer for stream in path for producer in stream.producers):
        for stored in node.args[1:3]:
            value = parameter(graph, stored)
            if value is not None:
                set_parameter(graph, str(stored.target), value[order])  # type: ignore[union-attr]
        if NORMAL in node.meta:
            node.meta[NORMAL] = tuple(value[order] for value in node.meta[NORMAL])
    for node in mixing:
        set_parameter(graph, _stored(node), _weight(graph, node)[:, order])


def _stored(layer: Node) -> str:
    return str(layer.args[1].target)  # type: ignore[union-attr]


def _weight(graph: GraphModule, node: Node) -> Tensor:
    weight = parameter(graph, node.args[1])
    assert weight is not None
    return weight


def _noise(weight: Tensor) -> float:
    """Σ of the squares of the steps' sizes that a layer's outputs have so that its pairs fit, over those of 8 bits."""
    whole = weight.flatten(1).abs().amax(1)
    square = whole.square().sum()
    return float(torch.maximum(whole, least_ends(weight, 1)).square().sum() / square) if square > 0 else 1.0


def costs(weights: Iterable[Tensor]) -> npt.NDArray[np.float64]:
    """What it costs the readers that channels are a pair, channels × channels; ``weights``: outputs × channels × …"""
    total: npt.NDArray[np.float64] = np.zeros(())
    for weight in weights:
        rows = weight.double().reshape(*weight.shape[:2], -1).transpose(1, 2)
        whole = rows.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
        share = (whole.square() / whole.square().mean()).expand(-1, rows.shape[1], -1).reshape(-1, 1)
        for side in (rows, -rows):
            far = ((side / whole).clamp(min=0.0) - 0.5).mul(_BETA).exp().reshape(-1, rows.shape[-1])
            total = total + ((far * share).T @ far).cpu().numpy()
    return total


def matched(cost: npt.NDArray[np.float64]) -> Tensor:
    """An order of channels, pair by pair, whose pairs cost little together; ``cost``: symmetric, of an even number."""
    cost = cost.copy()
    np.fill_diagonal(cost, np.inf)
    partner = _greedy(cost)
    everyone = np.arange(len(cost))
    for _ in range(_SWEEPS):
        changed = False
        for one in everyone:
            other = partner[one]
            gain = cost[one, other] + cost[everyone, partner] - cost[one] - cost[other][partner]
            gain[[one, other]] = 0.0
            third = int(gain.argmax())
            if gain[third] > _GAIN * cost[one, other]:
                fourth = partner[third]
                partner[[one, third, other, fourth]] = third, one, fourth, other
                changed = True
        if not changed:
            break
    firsts = everyone[everyone < partner]
    return torch.from_numpy(np.stack([firsts, partner[firsts]], 1).reshape(-1))


def _greedy(cost: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """A partner for each channel: those that are dear with most others choose first."""
    partner = np.full(len(cost), -1)
    free = np.ones(len(cost), bool)
    middle = np.median(np.where(np.isinf(cost), 0.0, cost), 1)
    for one in np.argsort(-middle, kind="stable"):
        if free[one]:
            free[one] = False
            other = int(np.where(free, cost[one], np.inf).argmin())
            free[other] = False
            partner[one], partner[other] = other, one
    return partner
