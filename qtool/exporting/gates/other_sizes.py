"""Inputs of other sizes than the samples have: what a file with open sizes is run with as well.

A file can hold a size of the samples where it should read its input's (the window of a pool, a number of repetitions),
and compute another thing, or nothing, for inputs of another size. So it is run with batches of one and of three, and
where axes behind the batch are open, with half of their size and with one more; then one axis with the one, the others
with the other. Twice the size is tried where the model takes none of these. What is longer repeats its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from qtool.graphs.captured import call_captured
from qtool.graphs.shapes import batch_symbols, input_values, symbols_of
from qtool.nested import map_tensors, num_samples, repeated, tensors

BATCHES = (1, 3)
FEW = 2
"""How many samples are run with other sizes behind the batch."""
LEAST = 2
"""The least size that is tried: torch captures a size of 1 as the model's own."""


class OtherSizes:
    """Inputs that a captured graph takes, each with what it gives for them, and the sizes of those that it refuses."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.taken: list[tuple[Any, Any]] = []
        self.refused: list[str] = []

    def try_batches(self, inputs: Any) -> None:
        """Runs the graph on a batch of inputs cut, or repeated, to other numbers of samples."""
        for size in BATCHES:
            if size != num_samples(inputs):
                self._run(self._of_samples(inputs, size))

    def try_open_sizes(self, inputs: Any) -> None:
        """Runs the graph on the first samples of a batch with other sizes where axes behind the batch are open."""
        inputs = self._of_samples(inputs, min(FEW, num_samples(inputs)))
        counts = batch_symbols(self.graph.graph)
        given = {symbol: size for symbol, size in _open(self.graph, inputs).items() if symbol not in counts}
        half = {symbol: max(LEAST, n // 2) for symbol, n in given.items()}
        longer = {symbol: n + 1 for symbol, n in given.items()}
        tried, took = [given], len(self.taken)
        for change in (half, longer, longer | {symbol: half[symbol] for symbol in list(given)[:1]}):
            if change not in tried:
                tried.append(change)
                self._run(_resized(self.graph, inputs, change))
        if given and len(self.taken) == took:
            self._run(_resized(self.graph, inputs, {symbol: n * 2 for symbol, n in given.items()}))

    def _of_samples(self, inputs: Any, size: int) -> Any:
        counts, before = batch_symbols(self.graph.graph), num_samples(inputs)
        given = _open(self.graph, inputs).items()
        return _resized(self.graph, inputs, {symbol: size for symbol, n in given if symbol in counts and n == before})

    def _run(self, inputs: Any) -> None:
        try:
            with torch.no_grad():
                self.taken.append((inputs, call_captured(self.graph, inputs)))
        except Exception:  # whatever the graph's operators say of a size
            self.refused.append(sizes_of(inputs))


def sizes_of(inputs: Any) -> str:
    """The shapes of a batch of inputs, each once."""
    shapes = (" × ".join(map(str, value.shape)) for value in tensors(inputs) if value.dim())
    return ", ".join(dict.fromkeys(shapes))


def _open(graph: GraphModule, inputs: Any) -> dict[Any, int]:
    """The open sizes of a captured graph's inputs and what they are in ``inputs``."""
    sizes: dict[Any, int] = {}
    for known, value in _pairs(graph, inputs):
        for size, given in zip(known.shape, value.shape, strict=True):
            symbols = symbols_of(size)
            if str(size) in map(str, symbols):
                sizes.setdefault(symbols.pop(), given)
    return sizes


def _resized(graph: GraphModule, inputs: Any, change: Mapping[Any, int]) -> Any:
    """``inputs`` with other open sizes, and with those that are computed from them."""
    known = {**_open(graph, inputs), **change}
    made = {}
    for meant, value in _pairs(graph, inputs):
        other = value
        for axis, size in enumerate(meant.shape):
            if isinstance(size, torch.SymInt) and symbols_of(size) & change.keys():
                other = repeated(other, axis, int(size.node.expr.subs(known)))
        made[id(value)] = other
    return map_tensors(lambda value: made.get(id(value), value), inputs)


def _pairs(graph: GraphModule, inputs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each input tensor, behind what the graph knows of it."""
    values = input_values(graph.graph)
    if isinstance(inputs, Mapping) and values.keys() <= inputs.keys():
        return zip(values.values(), (inputs[name] for name in values), strict=True)
    return zip(values.values(), tensors(inputs), strict=True)
