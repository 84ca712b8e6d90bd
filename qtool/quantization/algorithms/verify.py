"""Verification of a change of channels: what the readers of a stream make of it once everything is rounded.

A model of noise (``equalize.py``) decides how far channels are scaled; whether that was right is seen on samples. With
``x`` a value of the stream, ``m`` and ``s`` the shift and the scale of its channels, ``Q`` rounding to 8 bits over the
best of a few parts of the range seen and ``R`` rounding of weights by output channel, the error of a reader ``W`` is

    Var[ R(W / s) ∗ Q((x − m)·s) − W ∗ x ] / Var[W ∗ x]

with constant parts left out, which the bias takes up (and a shift is such a part). Errors of all readers are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.nested import call, num_samples, samples_of
from qtool.quantization.algorithms.streams import Stream, per_input
from qtool.quantization.capture import aten, parameter

SAMPLES = 16
VALUES = 2**20
"""How many values of one tensor are kept at most, in whole samples, two at least."""
WIDTHS = (1.0, 0.8, 0.6, 0.45, 0.3)
LEVELS, QMAX = 255, 127


class Samples:
    """The values that the readers of some streams read, on a few samples of the first batch."""

    @torch.no_grad()
    def __init__(self, graph: GraphModule, streams: Iterable[Stream], batches: Iterable[Any]) -> None:
        wanted = {reader.args[0] for stream in streams for reader in stream.consumers}
        watch = _Keep(graph, wanted)
        for batch in batches:
            call(watch.run, samples_of(batch, 0, min(SAMPLES, num_samples(batch))))
            break
        self.graph, self.kept = graph, watch.kept

    @torch.no_grad()
    def error(self, stream: Stream, scales: Tensor, moved: dict[Node, Tensor]) -> float:
        """The mean relative error of the stream's readers; ``moved`` is the shift of each value, if any."""
        readers = list(dict.fromkeys(stream.consumers))
        return sum(self._reader_error(reader, scales, moved) for reader in readers) / max(1, len(readers))

    def _reader_error(self, reader: Node, scales: Tensor, moved: dict[Node, Tensor]) -> float:
        source = reader.args[0]
        assert isinstance(source, Node)
        x, weight = self.kept[source], parameter(self.graph, reader.args[1])
        assert weight is not None
        shape = [-1] if reader.target is aten.linear.default else [-1, *[1] * (x.dim() - 2)]
        shift = moved[source].reshape(shape) if source in moved else torch.zeros(())
        changed = (x - shift) * scales.reshape(shape)
        made = rounded_rows(weight / per_input(weight, reader, scales))
        wanted = _spread(reader, x, weight)
        whole = float(wanted.square().mean()) + 1e-30
        errors = (_spread(reader, rounded(changed, width), made).sub_(wanted).square_().mean() for width in WIDTHS)
        return min(float(error) for error in errors) / whole


class _Keep(Interpreter):
    def __init__(self, graph: GraphModule, wanted: set[Any]) -> None:
        super().__init__(graph)
        self.wanted = wanted
        self.kept: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted:
            self.kept[n] = result[: max(2, VALUES // max(1, result[0].numel()))].clone()
        return result


def _spread(reader: Node, x: Tensor, weight: Tensor) -> Tensor:
    """A reader's output without its bias, the mean of each channel taken out."""
    rest = reader.args[3:] if reader.target is not aten.linear.default else ()
    made: Tensor = reader.target(x, weight, None, *rest)  # type: ignore[operator]
    axis = made.dim() - 1 if reader.target is aten.linear.default else 1
    return made - made.mean([d for d in range(made.dim()) if d != axis], keepdim=True)


def rounded(x: Tensor, width: float) -> Tensor:
    """``x`` on a grid of 8 bits over that part of its range, zero exact."""
    low, high = x.amin().clamp(max=0.0) * width, x.amax().clamp(min=0.0) * width
    step = ((high - low) / LEVELS).clamp(min=1e-30)
    zero = (-low / step).round()
    return ((x / step).round_() + zero).clamp_(0, LEVELS).sub_(zero).mul_(step)


def rounded_rows(weight: Tensor) -> Tensor:
    """Weights rounded to 8 bits by output channel, the first dimension."""
    step = weight.abs().flatten(1).amax(1).clamp(min=1e-30).reshape(-1, *[1] * (weight.dim() - 1)) / QMAX
    return (weight / step).round() * step
