"""SmoothQuant: outlier channels behind a normalisation are moved into the weights that read them.

In a transformer a few channels of what a layer norm hands to the linear layers behind it are many times as large as the
rest, for every token. They set the one scale of the tensor, and all other channels share a handful of steps. Weights
have no such channels, so part of the spread is handed to them (Xiao et al., arXiv 2211.10438):

    s_c = max|x_c|^α / max|w_c|^(1−α),      γ' = γ / s,   β' = β / s,   W' = W · diag(s)

which computes the same. ``max|w_c|`` is over all the layers that read the norm (query, key and value share one). The
paper takes α = ½ for most models and more for some. Here a few are tried on a sample of rows, each by what it is about:
the mean squared error of the readers' outputs with inputs and weights rounded, bias-corrected (the mean error is taken
out) and summed over readers, each relative to its own output. Where none is better than leaving the norm as it is, it
is left. Of few rows (a norm behind a pooling has one a sample) each quarter is judged by the extremes of the others:
α near 1 makes all that was seen of each channel fill the range, and clips what was not. A pass over the first
``SAMPLES`` samples is all that it costs, and a model without such norms costs nothing.

The factors are saved beside the ranges that were observed behind them, and taken from there where these are repeated.

A norm is a layer norm, a root-mean-square norm, or a product with a stored number for each channel, as many models end
the latter (``places.py``). What reads it are linear and recurrent layers and, where its channels are moved to the front
(ConvNeXt), convolutions: each of their taps is judged like an output of its own.

The model's own inputs are worse, and have no norm: they are given a product, ``x / s``, where that takes half of their
readers' error away (``raw_inputs.py``, ``INPUT_GAIN``). Where 8 bits do not do all the same, as for columns with long
tails, their readers stay in float (``ENOUGH_DB``): the first layer of a table is seldom worth more than its accuracy.

Left out on purpose: layers behind anything else. Between two linear layers that is equalization's business
(``equalize.py``), and behind a GELU nothing can be moved. So is a norm that a residual sum reads too (BERT).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import parameter, set_parameter
from qtool.nested import first
from qtool.quantization.algorithms.places import VECTORS, Place, place_of, rounded_weights, vectors, weights_of
from qtool.quantization.algorithms.raw_inputs import give_products, take_back
from qtool.quantization.algorithms.subject import Declined, NothingToDo, Subject, saved_numbers
from qtool.quantization.algorithms.verify import LEVELS, QMAX
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.placement import LEFT
from qtool.units import few

SAMPLES = 128
"""How many samples channels are observed on, where there are so many."""
ALPHAS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
ROWS = 2048
"""About how many rows of each norm's output are kept to judge by."""
HELD = 4
"""How many parts few rows are judged in."""
GAIN = 0.98
"""The share of the error that may be left where a change is made."""
INPUT_GAIN = 0.5
"""The same for an input: the product is an operator more."""
ENOUGH_DB = 35.0
"""What 8 bits have to leave of what an input's readers compute. Of normally distributed columns they leave 40, of
Student's t with 5 degrees of freedom 36, and of log-normal ones 29 to 34, where networks lost up to 3 points."""


@torch.no_grad()
def smooth(subject: Subject) -> None:
    """Moves outlier channels out of every norm's output that gains by it, in place; notes how many and why not others.

    Raises Declined where no norm is read by linear layers and convolutions alone.
    """
    if subject.config.weights_only:
        raise NothingToDo("activations stay in float")
    products = give_products(subject)
    try:
        found = {node: place_of(node) for node in subject.graph.graph.nodes if vectors(node)}
        if subject.config.ranges_from is not None:
            told = _repeat(subject, found, products)
        else:
            told = _choose(subject, _places(subject, found), products)
    finally:
        take_back(subject, products)
    subject.note(f"smooth: {told}")


def _places(subject: Subject, found: Mapping[Node, Place | str]) -> tuple[list[Place], list[Node]]:
    """What is worth moving, and all norms; notes why others are left."""
    told = {norm: _unrounded(place, subject) if isinstance(place, Place) else place for norm, place in found.items()}
    norms = [norm for norm, reason in told.items() if norm.target in VECTORS or not reason]
    if not norms:
        raise NothingToDo("there is no layer norm")
    for reason, count in sorted(Counter(told[norm] for norm in norms if told[norm]).items()):
        subject.note(f"smooth: {count} of {len(norms)} norms left as they are: {reason}")
    places = [place for norm in norms if not told[norm] and isinstance(place := found[norm], Place)]
    if not places:
        raise Declined("no norm is read by integer layers alone")
    return places, norms


def _repeat(subject: Subject, found: Mapping[Node, Place | str], products: Collection[Node]) -> str:
    """Applies the factors that were saved with the ranges, whichever layers are integer this time."""
    places = {norm.name: place for norm, place in found.items() if isinstance(place, Place)}
    saved = subject.saved("smooth", places)
    norms = [norm for norm in found if norm.target in VECTORS or norm.name in saved]
    if not norms:
        raise NothingToDo("there is no layer norm")
    for name, numbers in saved.items():
        if subject.ranges[name].get("left"):
            _leave(subject, places[name])
        channels = places[name].norm.meta["val"].shape[places[name].axis]
        apply(subject.graph, places[name], saved_numbers("smooth", name, numbers, channels).to(subject.device))
    return f"as saved with the ranges in {_counted([places[name].norm for name in saved], norms, products)}"


def _choose(subject: Subject, found: tuple[list[Place], list[Node]], products: Collection[Node]) -> str:
    """Finds and applies each norm's best factors, and saves them."""
    places, norms = found
    _observe(subject, places)
    form = subject.placement.target.activation
    levels, changed = form.qmax - form.qmin, {}
    for place in places:
        alpha = best_alpha(subject.graph, place, levels, INPUT_GAIN if place.norm in products else GAIN)
        scales = torch.ones_like(place.high) if alpha is None else factors(subject.graph, place, alpha)
        if place.norm in products and not _is_enough(subject.graph, place, scales, levels):
            _leave(subject, place)
            subject.ranges[place.norm.name] = {"smooth": torch.ones_like(scales).tolist(), "left": True}
        elif alpha is not None:
            apply(subject.graph, place, scales)
            subject.ranges[place.norm.name] = {"smooth": scales.tolist()}
            changed[place.norm] = alpha
        place.kept.clear()
    if not changed and set(norms) <= set(products):
        left = any(place.norm.name in subject.ranges for place in places)
        reason = "there is no layer norm, and no input whose channels are as far apart"
        raise NothingToDo("nothing else gains by it" if left else reason)
    told = f", α {min(changed.values()):g} to {max(changed.values()):g}" if changed else ""
    return f"rescaled {_counted(changed, norms, products)}{told}"


def _is_enough(graph: GraphModule, place: Place, scales: Tensor, levels: int) -> bool:
    """Whether 8 bits hold an input so rescaled; of fewer, which were asked for, nothing is taken back."""
    if levels < LEVELS - 1:
        return True
    in_bytes = dataclasses.replace(place, qmax=max(place.qmax, QMAX))
    error = output_error(graph, in_bytes, scales, levels) / len(place.readers)
    return not error > 10 ** (-ENOUGH_DB / 10)  # of NaN, which whoever observes ranges refuses, nothing is known


def _leave(subject: Subject, place: Place) -> None:
    """Leaves what reads an input in float, once the graph is placed anew."""
    names = [p.unit.name for p in subject.placement.placed if p.anchor in place.readers]
    for reader in place.readers:
        reader.meta[LEFT] = "it reads columns whose tails or units 8 bits do not hold"
    subject.note(f"smooth: left in float, since 8 bits do not hold the columns that it reads: {few(names)}")


def _counted(changed: Collection[Node], norms: Collection[Node], products: Collection[Node]) -> str:
    """How many of the norms were changed, and of the inputs, where any was."""
    inputs = sum(norm in products for norm in norms)
    counts = {"norms": len(norms) - inputs, "inputs": inputs}
    done = sum(norm in products for norm in changed)
    parts = zip(counts.items(), (len(changed) - done, done), strict=True)
    return " and ".join(
        f"{part} of {count} {name}" for (name, count), part in parts if part or (count and name == "norms")
    )


def _unrounded(place: Place, subject: Subject) -> str:
    """Why nothing is gained by moving; empty where integer layers alone read the norm, whose bits are noted."""
    steps = rounded_weights(subject)
    if not place.readers or not all(reader in steps for reader in place.readers):
        return "not all layers that read it are integer"
    place.qmax = min(steps[reader] for reader in place.readers)
    return ""


class _Observe(Interpreter):
    """Keeps a sample of rows and the extremes of each channel of some nodes."""

    def __init__(self, graph: GraphModule, places: list[Place]) -> None:
        super().__init__(graph)
        self.places = {place.norm: place for place in places}
        self.count = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.places:
            place = self.places[n]
            flat = result.detach().movedim(place.axis, -1).flatten(0, -2)
            low, high = torch.aminmax(flat, dim=0)
            place.low, place.high = torch.minimum(place.low, low), torch.maximum(place.high, high)
            draw = torch.Generator().manual_seed(self.count)
            few = torch.randperm(len(flat), generator=draw)[: max(1, ROWS // 8)]
            if len(place.kept) < 16:
                place.kept.append(flat[few.to(flat.device)].clone())
            place.rows += len(flat)
        return result


def _observe(subject: Subject, places: list[Place]) -> None:
    watch = _Observe(subject.graph, places)
    for batch in first(subject.batches, SAMPLES):
        interpret(watch, batch)
        watch.count += 1
    if not watch.count:
        raise Declined("no calibration data")


def factors(graph: GraphModule, place: Place, alpha: float) -> Tensor:
    """s of each channel, scaled to a geometric mean of 1; 1 where a channel or its weights are all zero."""
    values = torch.maximum(place.high, -place.low)
    weights = torch.stack([_weight(graph, reader).abs().amax((0, 1)) for reader in place.readers]).amax(0)
    used = (values > 0) & (weights > 0)
    logs = torch.where(used, alpha * values.log() - (1 - alpha) * weights.log(), 0.0)
    logs = torch.where(used, logs - logs[used].mean() if bool(used.any()) else 0.0, 0.0)
    return logs.clamp(-14.0, 14.0).exp()


def best_alpha(graph: GraphModule, place: Place, levels: int, left: float = GAIN) -> float | None:
    """The α of least error; None where more than ``left`` of the error of leaving the norm as it is stays."""
    parts = _parts(place)
    plain = sum(output_error(graph, part, torch.ones_like(part.high), levels) for part in parts)
    errors = {a: sum(output_error(graph, part, factors(graph, part, a), levels) for part in parts) for a in ALPHAS}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < left * plain else None


def _parts(place: Place) -> list[Place]:
    """What a norm is judged by: the rows that were kept or, where these are all, each quarter by the others' range."""
    rows = torch.cat(place.kept)
    if place.rows > len(rows):
        return [place]
    parts = rows.tensor_split(min(HELD, max(1, len(rows) // 2)))
    others = [torch.cat([p for p in parts if p is not part] or [part]) for part in parts]
    ends = [torch.aminmax(rest, dim=0) for rest in others]
    return [
        dataclasses.replace(place, kept=[part], low=low.clamp(max=0.0), high=high.clamp(min=0.0))
        for part, (low, high) in zip(parts, ends, strict=True)
    ]


def output_error(graph: GraphModule, place: Place, scales: Tensor, levels: int) -> float:
    """The variance of the readers' output errors over that of their outputs, both quantized, with ``scales`` for s."""
    x = torch.cat(place.kept)
    low, high = (place.low / scales).amin().clamp(max=0.0), (place.high / scales).amax().clamp(min=0.0)
    step = ((high - low) / levels).clamp(min=1e-30)
    zero = (-low / step).round()
    rounded = (((x / scales) / step).round().clamp(-zero, levels - zero)) * step
    total = 0.0
    for reader in place.readers:
        weight = _weight(graph, reader)
        own = (weight * scales).abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / place.qmax
        wanted, got = (
            rows @ taps.flatten(0, 1).T
            for rows, taps in ((x, weight), (rounded, (weight * scales / own).round() * own))
        )
        total += float((wanted - got).var(0, correction=0).sum() / wanted.var(0, correction=0).sum().clamp(min=1e-30))
    return total


def apply(graph: GraphModule, place: Place, scales: Tensor) -> None:
    """Divides the norm's weights by ``scales`` and multiplies the columns of its readers, in place."""
    for index in vectors(place.norm):
        stored = place.norm.args[index] if index < len(place.norm.args) else None
        if isinstance(stored, Node):
            value = parameter(graph, stored)
            assert value is not None
            set_parameter(graph, str(stored.target), value / scales.reshape(value.shape))
    for stored in (stored for reader in place.readers for stored in weights_of(reader)):
        weight = parameter(graph, stored)
        assert weight is not None
        set_parameter(graph, str(stored.target), weight * scales.reshape(-1, *[1] * (weight.dim() - 2)))


def _weight(graph: GraphModule, reader: Node) -> Tensor:
    """A layer's weights: outputs × taps × inputs."""
    found = [parameter(graph, stored) for stored in weights_of(reader)]
    weight = torch.cat([part for part in found if part is not None])
    return weight.flatten(2).transpose(1, 2) if weight.dim() > 2 else weight[:, None]
