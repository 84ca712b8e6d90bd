"""What an instance norm reads: each channel with mean 0 and as wide as the widest, at no cost to what it computes.

    norm(s · (x − m)) = norm(x),    m exactly, s > 0 as far as the variance is above ε

The norm takes out the offset and the size of each channel of each sample, so that the convolution in front is free in
both. One range for all channels then fits each: unlike what readers have to undo (``equalize.py``), this costs nothing.
Left as they are: channels whose variance came near ε in some sample, since their size is not taken out; group norms,
which compare channels; transposed convolutions, whose results are shuffled before the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import parameter, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten
from qtool.nested import micro_batches
from qtool.quantization.algorithms.bias import add_to_bias, bias_of, set_bias
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.rewrites.norms import readers_of, scaled

MOST = 16.0
"""The greatest factor."""
FAR = 1000.0
"""Variances over ε above which ε changes a result by less than a two-thousandth."""


def find_norm_inputs(subject: Subject) -> dict[Node, Node]:
    """The convolutions whose quantized result an instance norm alone reads, each with that norm."""
    graph = subject.graph
    readers, quantized = readers_of(graph), {p.output for p in subject.placement.placed if p.quantized_output}
    found = {}
    for norm in graph.graph.nodes:
        if norm.target is not aten.instance_norm.default or not norm.args[5]:
            continue
        source = norm.args[0]
        if source.target not in CONVOLUTIONS or list(source.users) != [norm] or source not in quantized:
            continue
        if parameter(graph, source.args[1]) is not None and readers[str(source.args[1].target)] == 1:
            found[source] = norm
    return found


class _Look(Interpreter):
    """What norms read, channel by channel: both ends, the mean of each sample, and the least variance of one."""

    def __init__(self, graph: GraphModule, wanted: Iterable[Node]) -> None:
        super().__init__(graph)
        self.wanted = set(wanted)
        self.seen: dict[Node, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted:
            places, rest = list(range(2, result.dim())), [0, *range(2, result.dim())]
            means, variances = result.double().mean(places), result.var(places, correction=0)
            now = result.amin(rest), result.amax(rest), means, variances.amin(0)
            if n in self.seen:
                low, high, before, least = self.seen[n]
                now = (
                    torch.minimum(low, now[0]), torch.maximum(high, now[1]), torch.cat([before, now[2]]),
                    torch.minimum(least, now[3]),
                )  # fmt: skip
            self.seen[n] = now
        return result


@torch.no_grad()
def even_norm_inputs(subject: Subject, found: dict[Node, Node], batches: Iterable[Any], piece: int) -> int:
    """Shifts and scales the channels of such convolutions in place, and saves by how much; returns how many."""
    look = _Look(subject.graph, (norm.all_input_nodes[0] for norm in found.values()))
    for batch in batches:
        for part in micro_batches(batch, piece):
            interpret(look, part)
    for conv, norm in found.items():
        low, high, means, least = look.seen[norm.all_input_nodes[0]]
        mean = means.mean(0).float()
        reach = torch.maximum(high - mean, mean - low)
        scales = (reach.amax() / reach.clamp(min=math.ulp(0.0))).clamp(max=MOST)
        scales = torch.where(least > FAR * float(norm.args[7]), scales, 1.0)  # type: ignore[arg-type]
        change_norm_input(subject.graph, conv, mean, scales)
        subject.ranges.setdefault(conv.name, {})["equalize"] = {"scales": scales.tolist(), "shifts": [mean.tolist()]}
    return len(found)


@torch.no_grad()
def change_norm_input(graph: GraphModule, conv: Node, mean: Tensor, scales: Tensor) -> None:
    """Gives a convolution's channels less ``mean``, times ``scales``; in place."""
    weight, name = parameter(graph, conv.args[1]), str(conv.args[1].target)  # type: ignore[union-attr]
    assert weight is not None
    add_to_bias(graph, conv, -mean.double())
    set_bias(graph, conv, bias_of(graph, conv) * scales.double())
    set_parameter(graph, name, scaled(weight, scales, conv).float())
