"""Layers as matrices beside their float originals: what each is given, in order, while both models are walked.

A layer that is fitted to its inputs needs two of them: ``x``, what it would get in the float model, and ``x̂``, what it
gets out of layers that are quantized already. Both models are walked side by side (``walk.py``), the float one only as
far as the other needs it, and of the rows (``rows.py``) of either only moments are kept: with means taken out

    S = E[x xᵀ],   C = E[x x̂ᵀ],   H = E[x̂ x̂ᵀ],      E ‖W x − Ŵ x̂‖²  =  tr(W S Wᵀ) − 2 tr(W C Ŵᵀ) + tr(Ŵ H Ŵᵀ)

so that the error of any candidate Ŵ costs no further pass. Even and odd batches (of one batch alone the halves) are
kept apart: what is fitted on one half can be judged on the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten, groups_of
from qtool.quantization.algorithms.bias import add_to_bias, bias_of, mean_output, set_bias, source_of
from qtool.quantization.algorithms.rows import reason, rows
from qtool.quantization.algorithms.spool import BUDGET
from qtool.quantization.algorithms.subject import Declined, Subject
from qtool.quantization.algorithms.walk import Beside, Segment, Walk
from qtool.quantization.integers import store_before
from qtool.quantization.stored_weights import dequantize_of, ends_of, integers_of, is_grouped, scales_of, store_integers
from qtool.units import few

ROWS = 16384
"""About how many rows a layer is observed on."""


def in_order(subject: Subject, *, all_kinds: bool = False, budget: int = BUDGET) -> Iterator[Layer]:
    """Every integer convolution and linear layer that can be written as rows, each once those before it are settled.

    What a layer is given is read with ``layer.observe()``; its stored tensors may be changed before the next is asked
    for. With ``all_kinds`` those too that have no rows. Each walk holds values up to ``budget`` bytes in memory. Raises
    Declined where there is none, and without calibration samples.
    """
    anchors = {node: other for node, other in subject.anchors().items() if all_kinds or not reason(node)}
    if not anchors:
        raise Declined(
            "no convolution or linear layer is integer" + ("" if all_kinds else " and can be written as rows")
        )
    if next(iter(subject.batches), None) is None:
        raise Declined("no calibration samples")
    held = [source_of(other) for other in anchors.values()]
    with (
        Walk(subject.graph, subject.batches, budget=budget, layers=anchors) as walk,
        Walk(subject.reference, subject.batches, budget=budget, held=held) as plain,
    ):
        beside = Beside(plain, held)
        for segment in walk.segments:
            for node in segment.nodes:
                if node in anchors:
                    yield Layer(walk, segment, node, beside, anchors[node])
                    walk.forget()
                    beside.finish(source_of(anchors[node]))
            walk.advance(segment)
    subject.graph.recompile()


def leave_shared(subject: Subject, name: str) -> set[Node]:
    """The integer layers whose integers another reads too, which no pass can fit to the inputs of one; notes them.

    So do lookups in a table that is a layer's weight: their rows are rounded to the nearest integers.
    """
    anchors = subject.anchors()
    stored = {layer: str(dequantize_of(layer).args[0]) for layer in anchors}
    counts = Counter(stored.values())
    lookups = (n for n in subject.reference.graph.nodes if n.target is aten.embedding.default)
    tables = {_place(subject, lookup.args[0]) for lookup in lookups} - {None}
    shared = [
        layer for layer, other in anchors.items()
        if counts[stored[layer]] > 1 or _place(subject, other.args[1]) in tables
    ]  # fmt: skip
    if shared:
        told = few([str(layer.meta["unit"]) for layer in shared])
        subject.note(f"{name} left layers that share a weight as they are: {told}")
    return set(shared)


def _place(subject: Subject, node: Any) -> int | None:
    """Where in memory a constant of the float graph stands; None for what is computed."""
    value = parameter(subject.reference, node)
    return None if value is None else value.data_ptr()


class Layer:
    """One layer as matrices: real weights G × outputs × K, the scales of its integers, the integers it came with.

    Scales are G × outputs × 1, or × K where inputs share them in groups.
    """

    def __init__(self, walk: Walk, segment: Segment, node: Node, beside: Beside, other: Node) -> None:
        self.walk, self.segment, self.beside = walk, segment, beside
        self.graph, self.node, self.other = walk.graph, node, other
        weight = parameter(beside.walk.graph, other.args[1])
        assert weight is not None
        self.weight, self.stored, self.groups = weight, dequantize_of(node), groups_of(node)
        self.ends = ends_of(node)

    @cached_property
    def real(self) -> Tensor:
        """The float model's weights."""
        return self._matrix(self.weight)

    @cached_property
    def scale(self) -> Tensor:
        """The scales of the integers."""
        return self._matrix(scales_of(self.graph, self.node))

    @cached_property
    def nearest(self) -> Tensor:
        """The integers that the layer came with, until others are stored."""
        return self._matrix(integers_of(self.graph, self.node))

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.double().flatten(1).reshape(self.groups, -1, weight[0].numel())

    @property
    def num_inputs(self) -> int:
        """How many inputs each output has: K."""
        return self.weight[0].numel()

    @property
    def name(self) -> str:
        """The unit that the layer belongs to."""
        return str(self.node.meta["unit"])

    def observe(self, num_rows: int = ROWS) -> tuple[Moments, Moments | None]:
        """The moments of the even and of the odd batches, or of the halves of one; None where there is one row.

        Of about ``num_rows`` rows, or four for each input where that is more.
        """
        self.beside.reach(source_of(self.other))
        given = self.walk.values(self.segment, source_of(self.node))
        originals = self.beside.walk.held(source_of(self.other))
        wanted = max(num_rows, 4 * self.num_inputs)
        halves: list[Moments | None] = [None, None]
        for index, (q, x) in enumerate(zip(given, originals, strict=True)):
            each = -(-wanted // (self.walk.num_batches * len(x)))
            drawn = [
                rows(self.node, self.weight, value, each, torch.Generator().manual_seed(index)) for value in (x, q)
            ]
            parts = zip(*(each_rows.chunk(1 + (self.walk.num_batches == 1), 1) for each_rows in drawn), strict=True)
            for half, part in enumerate(parts, index):
                found, before = Moments.of(*part), halves[half % 2]
                halves[half % 2] = found if before is None else before + found
        assert halves[0] is not None
        return halves[0], halves[1]

    def plain_error(self, moments: Moments) -> float:
        """The output error of the integers that the layer came with."""
        return output_error(self.real, self.nearest * self.scale, moments)

    def store(self, made: Tensor, change: Tensor) -> None:
        """Writes the integers, and the float model's bias with ``change``, whatever bias there was."""
        store_integers(self.graph, self.node, made)
        self.nearest = made
        self._change_bias(change)

    def rescale(self, factor: Tensor) -> None:
        """Multiplies the scales of the layer's integers, G × outputs × 1."""
        self.scale = (self.scale * factor).float().double()
        integers = parameter(self.graph, self.stored.args[0])
        assert integers is not None
        value = self.scale[..., :: integers.shape[1] if is_grouped(self.node) else 1].flatten().float()
        self.stored.update_arg(1, store_before(self.graph, self.stored, f"{self.node.name}_weight_scale", value))

    def correct_bias(self) -> None:
        """Gives the layer a bias with which its mean output is the float model's; reads means alone, no rows."""
        source = source_of(self.other)
        self.beside.reach(source)
        plain = self.beside.walk
        wanted = mean_output(plain, self.other, ((x.mean(0, keepdim=True), len(x)) for x in plain.held(source)))
        got = mean_output(self.walk, self.node, self.walk.means(self.segment, source_of(self.node)))
        add_to_bias(self.graph, self.node, wanted - got)

    def keep_mean(self, moments: Moments) -> None:
        """Gives the layer a bias that keeps the mean output."""
        self._change_bias(self.bias_change(self.nearest, moments))

    def _change_bias(self, change: Tensor) -> None:
        set_bias(self.graph, self.node, bias_of(self.beside.walk.graph, self.other) + change)

    def bias_change(self, made: Tensor, moments: Moments) -> Tensor:
        """What the float model's bias has to change by for these integers to keep the mean output, float64."""
        wanted = (self.real @ moments.x[:, :, None]).flatten()
        return wanted - ((made * self.scale) @ moments.q[:, :, None]).flatten()


@dataclass
class Moments:
    """Means of the float inputs ``x`` and the quantized ones ``q``, G × K, and S, C, H summed about them, G × K × K.

    float64. Products are taken about each batch's own means, so that nothing cancels (Chan, Golub and LeVeque 1979).
    """

    x: Tensor
    q: Tensor
    sums: tuple[Tensor, Tensor, Tensor]
    count: int

    @classmethod
    def of(cls, x: Tensor, q: Tensor) -> Moments:
        """The moments of one batch of rows, G × N × K."""
        mean_x, mean_q = x.mean(1, keepdim=True), q.mean(1, keepdim=True)
        x, q = x - mean_x, q - mean_q
        sums = ((x.mT @ x).double(), (x.mT @ q).double(), (q.mT @ q).double())
        return cls(mean_x[:, 0].double(), mean_q[:, 0].double(), sums, x.shape[1])

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        part = other.count / count
        x, q = other.x - self.x, other.q - self.q
        between = [a[:, :, None] * b[:, None] * self.count * part for a, b in ((x, x), (x, q), (q, q))]
        s, c, h = (a + b + d for a, b, d in zip(self.sums, other.sums, between, strict=True))
        return Moments(self.x + x * part, self.q + q * part, (s, c, h), count)

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """S, C and H about the means."""
        s, c, h = (value / self.count for value in self.sums)
        return s, c, h


def output_error(real: Tensor, made: Tensor, moments: Moments) -> float:
    """E ‖W x − Ŵ x̂‖² about the means, summed over outputs; weights G × outputs × K, float64."""
    s, c, h = moments.centred()
    return float(((real @ s) * real).sum() - 2 * ((real @ c) * made).sum() + ((made @ h) * made).sum())
