"""What an instance or group norm reads: each group with mean 0 and as wide as the widest, at no cost to the result.

    norm(s · (x − m)) = norm(x),    m exactly, s > 0 as far as the variance is above ε

The norm takes out the offset and the size of each group of channels of each sample (an instance norm's are of one
channel), so that the convolution in front is free in both. One range for all channels then fits each group: unlike what
readers have to undo (``equalize.py``), this costs nothing. Left as they are: groups whose variance came near ε in some
sample, since their size is not taken out; transposed convolutions, whose results are shuffled before the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import parameter, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten
from qtool.nested import micro_batches
from qtool.quantization.algorithms.bias import add_to_bias, bias_of, set_bias
from qtool.quantization.algorithms.subject import Subject, is_data_sized
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.rewrites.norms import readers_of, scaled

MOST = 16.0
"""The greatest factor."""
FAR = 1000.0
"""Variances over ε above which ε changes a result by less than a two-thousandth."""


class Norm(NamedTuple):
    """What is known of a norm: the number of its groups, and its ε."""

    groups: int
    eps: float


def find_norm_inputs(subject: Subject) -> dict[Node, Norm]:
    """The convolutions whose quantized result a norm of several groups alone reads."""
    graph = subject.graph
    readers, quantized = readers_of(graph), {p.output for p in subject.placement.placed if p.quantized_output}
    found = {}
    for node in graph.graph.nodes:
        norm, source = _norm(node), next(iter(node.all_input_nodes), node)
        if norm is None or source.target not in CONVOLUTIONS or list(source.users) != [node] or source not in quantized:
            continue
        weight: Any = source.args[1]
        alone = parameter(graph, weight) is not None and readers[str(weight.target)] == 1
        if alone and not is_data_sized(source):
            found[source] = norm
    return found


def _norm(node: Node) -> Norm | None:
    """Such a norm; None for anything else, and for one group, which one range fits anyway."""
    arguments: Any = node.args
    if node.target is aten.instance_norm.default and arguments[5]:
        return Norm(node.meta["val"].shape[1], arguments[7])
    if node.target is aten.group_norm.default and arguments[1] > 1:
        return Norm(arguments[1], arguments[4] if len(arguments) > 4 else 1e-5)
    return None


class _Look(Interpreter):
    """What norms read, group by group: both ends, the mean of each sample, and the least variance of one."""

    def __init__(self, graph: GraphModule, norms: Mapping[Node, Norm]) -> None:
        super().__init__(graph)
        self.norms = norms
        self.seen: dict[Node, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.norms:
            values = result.reshape(len(result), self.norms[n].groups, -1)
            low, high = values.amin((0, 2)), values.amax((0, 2))
            means, least = values.double().mean(2), values.var(2, correction=0).amin(0)
            if n in self.seen:
                before = self.seen[n]
                low, high = torch.minimum(before[0], low), torch.maximum(before[1], high)
                means, least = torch.cat([before[2], means]), torch.minimum(before[3], least)
            self.seen[n] = low, high, means, least
        return result


@torch.no_grad()
def even_norm_inputs(subject: Subject, found: Mapping[Node, Norm], batches: Iterable[Any], piece: int) -> int:
    """Shifts and scales the channels of such convolutions in place, and saves by how much; returns how many."""
    look = _Look(subject.graph, found)
    for batch in batches:
        for part in micro_batches(batch, piece):
            interpret(look, part)
    for conv, norm in found.items():
        low, high, means, least = look.seen[conv]
        mean = means.mean(0).float()
        reach = torch.maximum(high - mean, mean - low)
        scales = (reach.amax() / reach.clamp(min=math.ulp(0.0))).clamp(max=MOST)
        scales = torch.where(least > FAR * norm.eps, scales, 1.0)
        width = conv.meta["val"].shape[1] // norm.groups
        mean, scales = mean.repeat_interleave(width), scales.repeat_interleave(width)
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
