"""One region as a function of its weights: run on stored values, differentiable, compared with the float model's value.

The region's inputs are what the quantized network makes so far, its quantizers are straight through for gradients, and
errors are counted channel by channel: a channel of small values may matter as much as one of large ones. A minibatch is
taken out of one stored batch, so that memory does not grow with the set, and all parts of a batch have their turn
before another is read.

Every ``HELD`` th sample is held out: it is never trained on, and says what was gained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from qtool.form import quantized
from qtool.graphs.shapes import batch_symbols
from qtool.quantization.algorithms.regions import Region, batch_axis, order_of
from qtool.quantization.algorithms.walk import Walk, dequantize
from qtool.quantization.quantizers.fake_quantize import fake_quantize

HELD = 8
"""Every so many samples one is held out."""
MINIBATCH, POSITIONS = (4, 32), 8192
"""The fewest and most samples of a step, and how many places in the output are enough: neighbours tell the same."""
_QUANTIZE = quantized.quantize_per_tensor.default
_DEQUANTIZE = quantized.dequantize_per_tensor.default
Given = Mapping[Node, tuple[Tensor, Tensor]]
"""Weights and shifts of biases that stand in for those of the graph."""


@dataclass
class Part:
    """A region between the two walks.

    ``goal`` gives float counterparts: of the region's output, and of the integers it reads where half of these are to
    be left in float by ``drop``. ``sizes`` counts the samples of each batch, and ``axis`` the channels of the output.
    """

    region: Region
    goal: Mapping[Node, Node]
    walk: Walk
    plain: Walk
    sizes: list[int]
    axis: int
    drop: float = 0.0

    def errors(self, given: Given, index: int, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The squared error of each channel of the region's output, the mean over ``rows`` of a batch.

        With a generator values are left in float at random.
        """
        made: Tensor = self.run(index, rows, given, generator)[self.region.output]
        wanted: Tensor = self._picked(self.goal[self.region.output], self.plain, index, rows)
        gap = (made - wanted).square()
        axis = self._channels(gap)
        if axis is None:
            return gap.sum().reshape(1) / len(rows)
        return gap.sum([dim for dim in range(gap.dim()) if dim != axis]) / len(rows)

    def _channels(self, value: Tensor) -> int | None:
        """The dimension of the region's output that counts channels; None where one number of each sample is left."""
        batch = self._batch_axis(self.region.output)
        return None if value.dim() == 1 or self.axis % value.dim() == batch else self.axis % value.dim()

    @torch.no_grad()
    def held_errors(self, given: Given) -> Tensor:
        """The squared error of each channel, summed over the samples held out, float64."""
        rows = [(index, self._rows(index, held=True)) for index in range(self.walk.num_batches)]
        found = [self.errors(given, index, chosen).double() * len(chosen) for index, chosen in rows if len(chosen)]
        return torch.stack(found).sum(0)

    def minibatches(self, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Batches in random order, again and again, each in random parts; what is held out is in none."""
        trained, most = [self._rows(index, held=False) for index in range(self.walk.num_batches)], self.minibatch
        while True:
            for index in torch.randperm(len(trained), generator=generator).tolist():
                if len(rows := trained[index]):
                    drawn = rows[torch.randperm(len(rows), generator=generator)]
                    yield from ((index, part) for part in drawn.tensor_split(-(-len(rows) // most)))

    @property
    def minibatch(self) -> int:
        """The samples of a step: as many as have ``POSITIONS`` places in the region's output."""
        value = self.plain.stored(self.goal[self.region.output], 0)
        places = int(value.numel()) // (self.sizes[0] * int(value.shape[self.axis % value.dim()]))
        return max(MINIBATCH[0], min(MINIBATCH[1], POSITIONS // max(1, places)))

    def _rows(self, index: int, held: bool) -> Tensor:
        """The samples of a batch that are held out, or those that are not."""
        first = sum(self.sizes[:index])
        place = torch.arange(first, first + self.sizes[index])
        return ((place % HELD == HELD - 1) == held).nonzero().flatten()

    def run(self, index: int, rows: Tensor, given: Given, generator: torch.Generator | None = None) -> dict[Node, Any]:
        """The value of every operator of the region for some samples of a batch."""
        env: dict[Node, Any] = {node: self._entry(node, index, rows, generator) for node in self.region.reads}

        def value(node: Node) -> Any:
            return env[node] if node in env else self.walk.constant(node)

        for node in self.region.nodes:
            if node.target is _QUANTIZE:
                env[node] = self._quantized(value(node.args[0]), node, generator)  # type: ignore[arg-type]
            elif node.target is _DEQUANTIZE:
                env[node] = value(node.args[0])  # type: ignore[arg-type]
            else:
                args = _with(node, given[node], value) if node in given else map_arg(node.args, value)
                env[node] = node.target(*args, **map_arg(node.kwargs, value))  # type: ignore[operator]
        return env

    def _quantized(self, value: Tensor, node: Node, generator: torch.Generator | None) -> Tensor:
        scale, zero_point, qmin, qmax = cast(tuple[float, int, int, int], node.args[1:5])
        grid = value.new_full((), scale), value.new_full((), zero_point, dtype=torch.int32)
        rounded = fake_quantize(value, *grid, qmin, qmax)
        return rounded if generator is None else self._dropped(rounded, value, generator)

    def _dropped(self, rounded: Tensor, value: Tensor, generator: torch.Generator) -> Tensor:
        """``rounded``, with the probability of ``drop`` the float ``value`` instead."""
        return torch.where(
            torch.rand(value.shape, generator=generator, device=value.device) < self.drop, value, rounded
        )

    def _entry(self, node: Node, index: int, rows: Tensor, generator: torch.Generator | None) -> Any:
        """A value that comes into the region, in float."""
        value = self._picked(node, self.walk, index, rows)
        if node.target is not _QUANTIZE:
            return value
        value = dequantize(value, *node.args[1:3])  # type: ignore[arg-type]
        if generator is None or node not in self.goal:
            return value
        return self._dropped(value, self._picked(self.goal[node], self.plain, index, rows), generator)

    def _picked(self, node: Node, walk: Walk, index: int, rows: Tensor) -> Any:
        """A stored value, of some samples of its batch; what does not depend on how many there are stays whole."""
        value, size, axis = walk.stored(node, index), self.sizes[index], self._batch_axis(node)
        if axis is None:
            return value
        if not isinstance(value, Tensor):
            return value * len(rows) // size
        return _samples(value, size, rows, axis, self._orders[node])

    @functools.cached_property
    def _orders(self) -> dict[Node, tuple[int, int]]:
        """How samples are ordered in what is picked from (:func:`order_of`)."""
        found = {node: order_of(_source(node), self._batch) for node in (*self.region.reads, *self.goal.values())}
        return {node: order for node, order in found.items() if order is not None}

    @functools.cached_property
    def _batch(self) -> set[Any]:
        return batch_symbols(self.walk.graph.graph) | batch_symbols(self.plain.graph.graph)

    def _batch_axis(self, node: Node) -> int | None:
        """The dimension of a value that grows with the batch, 0 for a size that does; None for what does not."""
        return batch_axis(_source(node), self._batch)


def tells_samples(region: Region, goal: Mapping[Node, Node], symbols: set[Any]) -> bool:
    """Whether single samples can be taken out of all that a region reads, makes and is compared with."""
    nodes = (*region.reads, region.output, *goal.values())
    return all(order_of(_source(node), symbols) is not None for node in nodes)


def _source(node: Node) -> Node:
    """What is quantized where ``node`` does that: no more is known of integers than of it."""
    source = node.args[0] if node.target is _QUANTIZE else node
    assert isinstance(source, Node)
    return source


def _samples(value: Tensor, size: int, rows: Tensor, axis: int, order: tuple[int, int]) -> Tensor:
    """Some of the ``size`` samples of a value whose ``axis`` counts them, or the positions of each, in this order."""
    rows = rows.to(value.device)
    if value.shape[axis] != size:
        parts = value.reshape(*value.shape[:axis], order[0], size, order[1], *value.shape[axis + 1 :])
        return parts.index_select(axis + 1, rows).flatten(axis, axis + 2)
    if axis or value.is_contiguous():
        return value.index_select(axis, rows)
    return value[rows]  # which keeps the order in memory


def _with(layer: Node, given: tuple[Tensor, Tensor], value: Callable[[Node], Any]) -> tuple[Any, ...]:
    """The arguments of a layer with another weight, and a shift added to its bias."""
    source, _, *others = cast(tuple[Any, ...], map_arg(layer.args, value))
    weight, shift = given
    bias = shift if not others or others[0] is None else others[0] + shift
    return source, weight, bias, *others[1:]
