"""Equalization: channels of one tensor are given ranges of like size, at no cost to what the network computes.

Activations have one scale for a whole tensor, weights one for each output channel. A channel that uses a hundredth of
its tensor's range has a hundredth of the steps. Scaling it up by ``s`` where it is made, and the weights that read
it down by ``s`` (Nagel et al., arXiv 1906.04721, there between two layers), costs its reader precision instead: small
columns beside large ones. How far to go is a trade, here settled by the noise that is to be expected where a
stream is read, steps being uniform noise of variance Δ²/12:

    J(s) = Σ_o g_o [ Σ_t Δ_t²/12 · Σ_i p_i (w_oi / s_i)² + (max_i |w_oi / s_i| / q)²/12 · Σ_i s_i² E[x_i²] ]

over the outputs ``o`` of all readers, ``t`` the quantized tensors of the stream, Δ_t their step once their channels are
scaled, ``p_i`` the share of a channel's values that are not zero (zero is exact: a channel that a ReLU keeps silent
makes no noise; scaled up, it would be clipped once it speaks in unseen samples), ``q`` the largest integer of a
reader's weights (127 in 8 bits, 7 in 4), and ``g_o`` the gain of an error there towards the model's output, squares of
weights summed backwards.
``s`` starts from ``(R / r_c)^α``, ``r_c`` the range of a channel and ``R`` the widest, ``α`` the best of a few
(``α = ½`` is the choice of SmoothQuant, 2211.10438, ``α = 1`` levels the ranges) and is improved by gradient descent.
A whole residual path is scaled at once (``streams.py``), which the two-layer form leaves out, and ReLU6 is handled,
up to what was seen of each channel, where that form has to replace it.

Channels are shifted before they are scaled; see ``absorb.py``. The model is one thing, what happens another: shifting
and scaling, each alone and neither are compared on samples held out (``verify.py``), and what does not help there is
not done.

A path that something else reads (a concatenation, a product, an output) is left as it is, and the note says so.

Shifts and scales are saved beside the ranges that were observed behind them, and taken from there where these are
repeated: ranges of one graph are wrong for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import parameter, set_parameter
from qtool.nested import thinned
from qtool.quantization.algorithms.absorb import carried, shift, shifts
from qtool.quantization.algorithms.channels_seen import Seen, observe
from qtool.quantization.algorithms.norm_inputs import Norm, even_norm_inputs, find_norm_inputs
from qtool.quantization.algorithms.streams import ANCHORS, Stream, find_streams, per_input, towards_inputs
from qtool.quantization.algorithms.subject import NothingToDo, Subject, is_data_sized, saved_numbers
from qtool.quantization.algorithms.verify import QMAX, Samples, parted
from qtool.quantization.residence import device_of
from qtool.quantization.rewrites.norms import NORMAL
from qtool.quantization.targets import RELU_LIKE
from qtool.units import many

SAMPLES = 256
"""How many samples the channels are observed on, where there are so many."""
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST = 256.0
"""The greatest factor, either way: a channel that is hardly used stays nearly so."""
LEFT = 0.9
"""The share of the readers' error that may be left where a path is changed: less gain is none at the output."""
_STEPS = 30
_NOISE = 1 / 12


def equalize(subject: Subject) -> None:
    """Rescales the channels of every stream that allows it, in place; notes how many and why others were left."""
    streams, norms = find_streams(subject.graph), find_norm_inputs(subject)
    if subject.config.ranges_from is not None:
        _repeat(subject, streams, norms)
    else:
        _choose(subject, streams, norms)
    subject.graph.graph.eliminate_dead_code()
    subject.graph.recompile()


def _repeat(subject: Subject, streams: list[Stream], norms: Mapping[Stream, Norm]) -> None:
    """Applies the shifts and scales that were saved with the ranges."""
    places = {_place(stream): stream for stream in streams if not stream.blocked and stream.consumers}
    places |= {_place(stream): stream for stream in norms}
    saved = subject.saved("equalize", places)
    for place, entry in saved.items():
        stream = places[place]
        scales, *made = (
            saved_numbers("equalize", place, numbers, stream.num_channels).to(subject.device)
            for numbers in (entry["scales"], *entry["shifts"])
        )
        by = carried(stream, dict(zip(stream.producers, made, strict=True))) if made else {}
        _change(subject, stream, by, scales)
    subject.note(f"equalize: as saved with the ranges in {len(saved)} of {len(streams)} paths")


def _choose(subject: Subject, streams: list[Stream], norms: Mapping[Stream, Norm]) -> None:
    """Finds and applies each stream's best shifts and scales, and saves them."""
    refusals = {stream: _refusal(stream, subject) for stream in streams}
    fit = [stream for stream, reason in refusals.items() if not reason]
    left = Counter(reason for reason in refusals.values() if reason)
    if not fit and not norms:
        raise NothingToDo(f"no path of channels can be rescaled{_told(left)}")
    batches = thinned(subject.batches, SAMPLES)
    if norms:
        for stream, by, scales in even_norm_inputs(subject.graph, norms, batches):
            _change_and_save(subject, stream, by, scales)
        subject.note(f"equalize: channels made as wide as the widest in front of {many(len(norms), 'norm')}")
    if not fit:
        return
    seen = observe(subject.graph, fit, parted(batches, held=False))
    gains = output_gains(subject.graph, streams)
    qmax = _largest_integers(subject, fit)
    samples = Samples(subject.graph, fit, batches, qmax)
    changed = moved = 0
    for stream in fit:
        by, scales, better = _best_change(subject, stream, seen, gains, samples)
        left["its readers did no better on samples"] += not better
        moved += bool(by)
        changed += not bool((scales == 1).all())
        if better:
            _change_and_save(subject, stream, by, scales)
    subject.note(f"equalize: rescaled {changed} and shifted {moved} of {len(streams)} paths{_told(left)}")


def _told(left: Counter[str]) -> str:
    """How many paths were left as they are, and why."""
    counts = [f"{count} ({reason})" for reason, count in sorted(left.items()) if count]
    return f"; left as they are: {', '.join(counts)}" if counts else ""


def _largest_integers(subject: Subject, streams: list[Stream]) -> dict[Node, int]:
    """That of each reader's weights, whose step is what scaling them costs; of a float reader's as if it had 8 bits."""
    found = {p.anchor: subject.placement.weight_format(p).steps for p in subject.placement.layers}
    return {reader: found.get(reader, QMAX) for stream in streams for reader in stream.consumers}


def _place(stream: Stream) -> str:
    """What a stream is saved under."""
    return stream.producers[0].name


def _change_and_save(subject: Subject, stream: Stream, by: dict[Node, Tensor], scales: Tensor) -> None:
    _change(subject, stream, by, scales)
    made = [by[producer].tolist() for producer in stream.producers if by]
    subject.ranges.setdefault(_place(stream), {})["equalize"] = {"scales": scales.tolist(), "shifts": made}


def _change(subject: Subject, stream: Stream, by: dict[Node, Tensor], scales: Tensor) -> None:
    """Shifts and rescales a stream."""
    if by:
        shift(subject.graph, stream, by)
    if not bool((scales == 1).all()):
        rescale(subject.graph, stream, scales)


def _best_change(
    subject: Subject, stream: Stream, seen: dict[Node, Seen], gains: dict[Node, Tensor], samples: Samples
) -> tuple[dict[Node, Tensor], Tensor, bool]:
    """The shifts and scales with which the stream's readers do best, and whether that is better than none at all."""
    quantized, ones = _quantized_values(stream, subject), torch.ones(stream.num_channels, device=subject.device)
    found = shifts(stream, {v: seen[v].lowest for v in stream.values}, {v: seen[v].middle for v in stream.values})
    if not all(seen[value].shifted(found[value]).is_told_apart(found[value]) for value in quantized if found):
        found = {}
    options: list[tuple[dict[Node, Tensor], Tensor]] = []
    for by in ([found] if found else []) + [{}]:
        moved_seen = seen | {value: seen[value].shifted(by[value]) for value in by}
        options += [
            (by, NoiseModel(subject.graph, stream, moved_seen, gains, quantized, samples.qmax).best()),
            (by, ones),
        ]
    errors = [samples.error(stream, scales, by) for by, scales in options]
    best = min(range(len(options)), key=errors.__getitem__)
    return (*options[best], True) if errors[best] < LEFT * errors[-1] else ({}, ones, False)


def _quantized_values(stream: Stream, subject: Subject) -> list[Node]:
    """The values of a stream that get a quantizer of their own."""
    made = {p.output for p in subject.placement.placed if p.pattern and p.quantized_output and not p.pattern.shares}
    return [value for value in stream.values if value in made]


def _refusal(stream: Stream, subject: Subject) -> str:
    if stream.blocked:
        return stream.blocked[0]
    if not stream.consumers:
        return "nothing reads it"
    if any(map(is_data_sized, stream.values)):
        return "the data decides how many rows it has"
    return "" if _quantized_values(stream, subject) else "nothing of it is quantized"


def output_gains(graph: GraphModule, streams: list[Stream]) -> dict[Node, Tensor]:
    """For each layer, the gain of the square of an error in each of its output channels towards the model's output.

    Summed backwards over all readers, as if every activation let everything through; scaled to a mean of 1, since only
    the proportions within a layer, and of layers that read one stream, are used.
    """
    stream_of = {value: stream for stream in streams for value in stream.values}
    gains: dict[Node, Tensor] = {}
    for node in reversed([n for n in graph.graph.nodes if n.target in ANCHORS]):
        stream = stream_of[node]
        total = torch.zeros(stream.num_channels, device=device_of(graph))
        for reader in dict.fromkeys(stream.consumers):
            weight = parameter(graph, reader.args[1])
            if weight is not None and reader in gains and not stream.blocked:
                total += towards_inputs(weight, reader, gains[reader])
        gains[node] = total / total.mean() if bool(total.sum() > 0) else torch.ones_like(total)
    return gains


def _high(value: Node, seen: dict[Node, Seen]) -> Tensor:
    """The upper ends of a value's channels; behind a ReLU at least a deviation of what it reads, if silent so far."""
    source = value.args[0]
    if value.target not in RELU_LIKE or source not in seen:
        return seen[value].highest
    read = seen[source]  # type: ignore[index]
    return torch.maximum(seen[value].highest, (read.square - read.mean.square()).clamp(min=0.0).sqrt())


@dataclass
class _Reader:
    """What J needs of one reader: the largest weight of each pair of channels, and p_i Σ_o g_o w_oi² of each input."""

    node: Node
    largest: Tensor
    squares: Tensor
    signal: Tensor
    gains: Tensor
    qmax: int

    @classmethod
    def of(cls, graph: GraphModule, node: Node, seen: dict[Node, Seen], gains: Tensor, qmax: int) -> _Reader:
        """From the reader's weight, the value that it reads and the gains of its outputs."""
        weight, source = parameter(graph, node.args[1]), node.args[0]
        assert weight is not None
        assert isinstance(source, Node)
        taps = weight[0, 0].numel()
        largest = weight.abs().flatten(2).amax(2) if weight.dim() > 2 else weight.abs()
        squares = towards_inputs(weight, node, gains) * seen[source].nonzero
        return cls(node, largest, squares, seen[source].square * taps, gains, qmax)

    def noise(self, scales: Tensor, activation: Tensor) -> Tensor:
        """The gained noise of its outputs; ``activation`` is that of each value that it reads."""
        ends = (self.largest / per_input(self.largest, self.node, scales)).amax(1) / self.qmax
        signal = per_input(self.largest, self.node, self.signal * scales.square()).sum(1)
        weights = _NOISE * (self.gains * ends.square() * signal).sum()
        return activation * (self.squares / scales.square()).sum() + weights


class NoiseModel:
    """J of one stream as a function of its channel scales; see the module's text."""

    def __init__(
        self, graph: GraphModule, stream: Stream, seen: dict[Node, Seen], gains: dict[Node, Tensor],
        quantized: list[Node], qmax: Mapping[Node, int],
    ) -> None:  # fmt: skip
        self.lows = torch.stack([seen[value].lowest for value in quantized]).clamp(max=0.0)
        self.highs = torch.stack([_high(value, seen) for value in quantized]).clamp(min=0.0)
        readers = dict.fromkeys(stream.consumers)
        self.readers = [_Reader.of(graph, node, seen, gains[node], qmax[node]) for node in readers]
        self.limit = self._limit(stream, seen)

    @staticmethod
    def _limit(stream: Stream, seen: dict[Node, Seen]) -> tuple[Tensor, Tensor]:
        """The least and greatest scale of each channel."""
        some = seen[stream.values[0]].low
        low = torch.full_like(some, 1 / MOST)
        high = torch.full_like(some, MOST)
        for node, cap in stream.caps.items():
            value = seen[node.args[0]]  # type: ignore[index]
            low = torch.where(value.highest >= cap, 1.0, low)  # else nothing is clipped that scaling down would let by
            room = (cap / value.reach().clamp(min=cap / MOST)).clamp(min=1.0)
            high = torch.minimum(high, torch.where(value.highest >= cap, 1.0, room))
        return torch.minimum(low, high), high

    def __call__(self, scales: Tensor) -> Tensor:
        """The expected noise of the readers' outputs, weighed by gain."""
        steps = ((self.highs * scales).amax(1) - (self.lows * scales).amin(1)) / 255
        activation = _NOISE * steps.square().sum()
        return torch.stack([reader.noise(scales, activation) for reader in self.readers]).sum()

    def best(self) -> Tensor:
        """The scales of least noise that were found; all 1 where nothing is better."""
        ranges = (self.highs - self.lows).amax(0)
        widest = ranges.amax().clamp(min=1e-30)
        with torch.no_grad():
            starts = [self._clamped((widest / ranges.clamp(min=1e-30 + widest / MOST)) ** alpha) for alpha in ALPHAS]
            costs = [float(self(start)) for start in starts]
        start = starts[min(range(len(starts)), key=costs.__getitem__)]
        return self._descend(start, min(costs), costs[0])

    def _clamped(self, scales: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(scales, self.limit[0]), self.limit[1])

    def _descend(self, start: Tensor, cost: float, unscaled: float) -> Tensor:
        best, logs = start, start.log().requires_grad_()
        optimizer = torch.optim.Adam([logs], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        with torch.enable_grad():
            for _ in range(_STEPS):
                scales = self._clamped(logs.exp())
                noise = self(scales)
                value = noise.item()
                if value < cost:
                    best, cost = scales.detach().clone(), value
                optimizer.zero_grad()
                torch.autograd.backward([noise.log()])
                optimizer.step()
                schedule.step()
        return best if cost < unscaled * (1 - 1e-3) else torch.ones_like(best)


@torch.no_grad()
def rescale(graph: GraphModule, stream: Stream, scales: Tensor) -> None:
    """Multiplies the stream's channels by ``scales`` where they are made and divides where they are read, in place."""
    for node in dict.fromkeys(stream.producers):
        for index in (1, 2):
            value = parameter(graph, node.args[index]) if len(node.args) > index else None
            if value is not None:
                scaled = value * scales.reshape(-1, *[1] * (value.dim() - 1))
                set_parameter(graph, str(node.args[index].target), scaled)  # type: ignore[union-attr]
        if NORMAL in node.meta:
            node.meta[NORMAL] = tuple(value * scales for value in node.meta[NORMAL])
    for node in dict.fromkeys(stream.consumers):
        weight = parameter(graph, node.args[1])
        assert weight is not None
        set_parameter(graph, str(node.args[1].target), weight / per_input(weight, node, scales))  # type: ignore[union-attr]
