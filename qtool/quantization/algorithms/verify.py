"""Verification of a change of channels: what the readers of a stream make of it once everything is rounded.

A model of noise (``equalize.py``) decides how far channels are scaled; whether that was right is seen on samples that
it was not made from: the last quarter of each batch is held out (``parted``). With ``x`` a value of the stream, ``m``
and ``s`` the shift and the scale of its channels, ``f`` the activation behind it that clips at fixed ends, ``Q``
rounding to 8 bits over the best of a few parts of the range seen and ``R`` rounding of weights by output channel, the
error of a reader ``W`` is

    Var[ R(W / s) ∗ Q(f((x − m)·s)) − W ∗ f(x) ] / Var[W ∗ f(x)]

with constant parts left out, which the bias takes up (and a shift is such a part). Errors of all readers are averaged.
``f`` is what makes held-out samples matter: a channel is scaled towards a ReLU6's end, or shifted down to a ReLU's
zero, as far as was seen, and an unseen value beyond is clipped. There, and there alone, the float function changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.nested import micro_batches, num_samples, samples_of
from qtool.quantization.algorithms.streams import Stream, pads_zeros, per_input
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.limits import clip_limits
from qtool.quantization.targets import RELU_LIKE

HELD = 4
"""One sample in so many is held out."""
SAMPLES = 16
ENOUGH = 2**16
"""More samples are looked at until one tensor has so many values: of a table's rows sixteen tell little."""
VALUES = 2**20
"""How many values of one tensor are kept at most, in whole samples, two at least."""
WIDTHS = (1.0, 0.8, 0.6, 0.45, 0.3)
LEVELS, QMAX = 255, 127


def parted(batches: Iterable[Any], held: bool, share: int = HELD) -> Iterator[Any]:
    """One in ``share`` samples of each batch, held out, or the others; a batch of one sample counts as both."""
    for batch in batches:
        size = num_samples(batch)
        kept = size - size // share if size >= share else size - 1
        if size == 1:
            yield batch
        else:
            yield samples_of(batch, kept, size) if held else samples_of(batch, 0, kept)


class Samples:
    """The values that the readers of some streams read, on samples that are held out of every batch.

    ``qmax`` is how many steps the farthest integer of each reader's weights stands for.
    """

    @torch.no_grad()
    def __init__(
        self, graph: GraphModule, streams: Iterable[Stream], batches: Iterable[Any], qmax: Mapping[Node, int]
    ) -> None:
        self.qmax = qmax
        watch = _Keep(graph, {_kept(reader.args[0]) for stream in streams for reader in stream.consumers})
        count = 0
        for piece in (piece for batch in parted(batches, held=True) for piece in micro_batches(batch, SAMPLES)):
            interpret(watch, piece)
            count += num_samples(piece)
            if count >= SAMPLES and watch.most() >= ENOUGH:
                break
        self.graph, self.kept = graph, {node: torch.cat(values) for node, values in watch.kept.items()}

    @torch.no_grad()
    def error(self, stream: Stream, scales: Tensor, moved: dict[Node, Tensor]) -> float:
        """The mean relative error of the stream's readers; ``moved`` is the shift of each value, if any."""
        readers = list(dict.fromkeys(stream.consumers))
        return sum(self._reader_error(reader, scales, moved) for reader in readers) / max(1, len(readers))

    def _reader_error(self, reader: Node, scales: Tensor, moved: dict[Node, Tensor]) -> float:
        source = reader.args[0]
        assert isinstance(source, Node)
        x, weight = self.kept[_kept(source)], parameter(self.graph, reader.args[1])
        assert weight is not None
        shape = [-1] if reader.target is aten.linear.default else [-1, *[1] * (x.dim() - 2)]
        shift = moved[source].reshape(shape) if source in moved else torch.zeros(())
        ends = clip_limits(acted) if (acted := _unpadded(source)).target in RELU_LIKE else (-math.inf, math.inf)
        changed = ((x - shift) * scales.reshape(shape)).clamp_(*ends)
        made = rounded_rows(weight / per_input(weight, reader, scales), self.qmax[reader])
        wanted = _spread(reader, x.clamp(*ends), weight)
        whole = float(wanted.square().mean()) + 1e-30
        errors = (_spread(reader, rounded(changed, width), made).sub_(wanted).square_().mean() for width in WIDTHS)
        return min(float(error) for error in errors) / whole


def _kept(source: Any) -> Node:
    """What is kept of a value: what an activation with fixed ends clips, or the value itself, without padding."""
    node = _unpadded(source)
    node = node.args[0] if node.target in RELU_LIKE else node  # type: ignore[assignment]
    assert isinstance(node, Node)
    return node


def _unpadded(source: Any) -> Node:
    """The value that a reader's own operator for padding puts zeros around, or what it reads."""
    assert isinstance(source, Node)
    node = source.args[0] if pads_zeros(source) else source
    assert isinstance(node, Node)
    return node


class _Keep(Interpreter):
    """Keeps values, in whole samples of one size: where sizes are open, that of the first."""

    def __init__(self, graph: GraphModule, wanted: set[Any]) -> None:
        super().__init__(graph)
        self.wanted = wanted
        self.kept: dict[Node, list[Tensor]] = {}

    def most(self) -> int:
        """The values that are kept of the tensor of which there are most."""
        return max((sum(part.numel() for part in parts) for parts in self.kept.values()), default=0)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted:
            kept = self.kept.setdefault(n, [])
            if kept and kept[0].shape[1:] != result.shape[1:]:
                return result
            room = max(2, VALUES // max(1, result[0].numel())) - sum(map(len, kept))
            kept.append(result[: max(0, room)].clone())
        return result


def _spread(reader: Node, x: Tensor, weight: Tensor) -> Tensor:
    """A reader's output without its bias, the mean of each channel taken out."""
    rest, source = reader.args[3:] if reader.target is not aten.linear.default else (), reader.args[0]
    if pads_zeros(source):  # type: ignore[arg-type]
        x = source.target(x, *source.args[1:])  # type: ignore[union-attr, operator]
    made: Tensor = reader.target(x, weight, None, *rest)  # type: ignore[operator]
    axis = made.dim() - 1 if reader.target is aten.linear.default else 1
    return made - made.mean([d for d in range(made.dim()) if d != axis], keepdim=True)


def rounded(x: Tensor, width: float) -> Tensor:
    """``x`` on a grid of 8 bits over that part of its range, zero exact."""
    low, high = x.amin().clamp(max=0.0) * width, x.amax().clamp(min=0.0) * width
    step = ((high - low) / LEVELS).clamp(min=1e-30)
    zero = (-low / step).round()
    return ((x / step).round_() + zero).clamp_(0, LEVELS).sub_(zero).mul_(step)


def rounded_rows(weight: Tensor, qmax: int = QMAX) -> Tensor:
    """Weights rounded to −``qmax`` … ``qmax`` by output channel, the first dimension."""
    step = weight.abs().flatten(1).amax(1).clamp(min=1e-30).reshape(-1, *[1] * (weight.dim() - 1)) / qmax
    return (weight / step).round() * step
