"""What is seen of channels in a float pass over samples: what equalization judges them by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.nested import micro_batches
from qtool.quantization.algorithms.streams import Stream
from qtool.quantization.algorithms.subject import Declined
from qtool.quantization.algorithms.walk import interpret

PIECE = 8
"""How many samples go through the graph at a time, which bounds the memory and changes nothing."""
HEADROOM = 48.0
"""Unseen samples go further than n seen: a ReLU6 may clip a channel at 1 + ``HEADROOM`` / n of its largest value."""
DEVIATIONS = 4.0, 192.0
"""And d + e / n standard deviations above its mean: a channel that was silent so far may speak up."""
NARROWEST = 2.0**-3
"""The part of the constants taken out of a tensor that its range has to keep. Sums in float32 are wrong by about 2⁻²³
of these constants; where that is more than a thousandth of a step, exact sums round to other integers too often."""


@dataclass
class Seen:
    """What was seen of a value's channels.

    Extremes, of all and the means of batches'; means of values and squares; and the share of values that are not zero.
    """

    low: Tensor
    high: Tensor
    highest: Tensor
    lowest: Tensor
    mean: Tensor
    square: Tensor
    nonzero: Tensor
    num_samples: int
    num_batches: int = 1

    @property
    def middle(self) -> Tensor:
        """The middle of the mean extremes."""
        return (self.low + self.high) / 2

    def reach(self) -> Tensor:
        """How far up values are taken to go: beyond what was seen, by its largest value and by its deviation."""
        deviation = (self.square - self.mean.square()).clamp(min=0.0).sqrt()
        factor, deviations = 1 + HEADROOM / self.num_samples, DEVIATIONS[0] + DEVIATIONS[1] / self.num_samples
        return torch.maximum(self.highest * factor, self.mean + deviations * deviation).clamp(min=0.0)

    @classmethod
    def of(cls, value: Tensor, axis: int) -> Seen:
        """Statistics of one batch."""
        rest = [d for d in range(value.dim()) if d != axis % value.dim()]
        low, high = value.amin(rest), value.amax(rest)
        return cls(
            low, high, high, low, value.mean(rest), value.square().mean(rest), value.ne(0).to(value.dtype).mean(rest),
            len(value),
        )  # fmt: skip

    def joined(self, other: Seen, *, same_batch: bool) -> Seen:
        """What was seen of both, of which ``other`` is another piece of one batch or another batch."""
        count, batches = self.num_samples + other.num_samples, self.num_batches + other.num_batches
        part, share = other.num_samples / count, other.num_batches / batches
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        if not same_batch:
            low, high = torch.lerp(self.low, other.low, share), torch.lerp(self.high, other.high, share)
        return Seen(
            low, high, torch.maximum(self.highest, other.highest), torch.minimum(self.lowest, other.lowest),
            torch.lerp(self.mean, other.mean, part), torch.lerp(self.square, other.square, part),
            torch.lerp(self.nonzero, other.nonzero, part), count, self.num_batches if same_batch else batches,
        )  # fmt: skip

    def is_told_apart(self, shift: Tensor) -> bool:
        """Whether what is left of the channels behind a ``shift`` is more than what rounding in float32 made of it."""
        span = self.highest.amax() - self.lowest.amin()
        return bool(span >= NARROWEST * shift.abs().amax())

    def shifted(self, m: Tensor) -> Seen:
        """What would have been seen of the value less ``m``."""
        square = (self.square - 2 * m * self.mean + m.square()).clamp(min=0.0)
        return replace(
            self, low=self.low - m, high=self.high - m, highest=self.highest - m, lowest=self.lowest - m,
            mean=self.mean - m, square=square, nonzero=torch.where(m == 0, self.nonzero, 1.0),
        )  # fmt: skip


class _Observe(Interpreter):
    """Sees one batch, in pieces."""

    def __init__(self, graph: GraphModule, axes: dict[Node, int]) -> None:
        super().__init__(graph)
        self.axes = axes
        self.seen: dict[Node, Seen] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.axes:
            piece = Seen.of(result, self.axes[n])
            self.seen[n] = self.seen[n].joined(piece, same_batch=True) if n in self.seen else piece
        return result


@torch.no_grad()
def observe(graph: GraphModule, streams: list[Stream], batches: Iterable[Any]) -> dict[Node, Seen]:
    """Channel statistics of every value of the streams: one float pass in pieces of ``PIECE`` samples."""
    axes = {value: stream.axis for stream in streams for value in stream.values}
    found: dict[Node, Seen] = {}
    for batch in batches:
        watch = _Observe(graph, axes)
        for piece in micro_batches(batch, PIECE):
            interpret(watch, piece)
        for node, seen in watch.seen.items():
            found[node] = found[node].joined(seen, same_batch=False) if node in found else seen
    if not found:
        raise Declined("no calibration data")
    return found
