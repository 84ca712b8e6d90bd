"""What an instance or group norm reads: each group with mean 0 and as wide as the widest, at no cost to the result.

    norm(s · (x − m)) = norm(x),    m exactly, s > 0 as far as the variance is above ε

The norm takes out the offset and the size of each group of channels of each sample (an instance norm's are of one
channel), so that the convolution in front is free in both. One range for all channels then fits each group: unlike what
readers have to undo (``equalize.py``), this costs nothing. Left as they are: groups whose variance came near ε in some
sample, since their size is not taken out; transposed convolutions, whose results are shuffled before the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.nested import micro_batches
from qtool.quantization.algorithms.channels_seen import PIECE
from qtool.quantization.algorithms.streams import ANCHORS, Stream
from qtool.quantization.algorithms.subject import Subject, is_data_sized
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.rewrites.norms import readers_of

MOST = 16.0
"""The greatest factor."""
FAR = 1000.0
"""Variances over ε above which ε changes a result by less than a two-thousandth."""


class Norm(NamedTuple):
    """What is known of a norm: the number of its groups, and its ε."""

    groups: int
    eps: float


def find_norm_inputs(subject: Subject) -> dict[Stream, Norm]:
    """The quantized results of convolutions that a norm of several groups alone reads, each a path without a reader."""
    graph = subject.graph
    readers, quantized = readers_of(graph), {p.output for p in subject.placement.placed if p.quantized_output}
    found = {}
    for node in graph.graph.nodes:
        norm, source = _norm(node), next(iter(node.all_input_nodes), node)
        if norm is None or source.target not in ANCHORS or list(source.users) != [node] or source not in quantized:
            continue
        weight: Any = source.args[1]
        alone = parameter(graph, weight) is not None and readers[str(weight.target)] == 1
        if alone and not is_data_sized(source):
            found[Stream(source.meta["val"].shape[1], 1, values=[source], producers=[source])] = norm
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
def even_norm_inputs(
    graph: GraphModule, found: Mapping[Stream, Norm], batches: Iterable[Any]
) -> Iterator[tuple[Stream, dict[Node, Tensor], Tensor]]:
    """The shifts and scales of such results, from what is seen of samples."""
    look = _Look(graph, {stream.values[0]: norm for stream, norm in found.items()})
    for batch in batches:
        for part in micro_batches(batch, PIECE):
            interpret(look, part)
    for stream, norm in found.items():
        (conv,) = stream.values
        low, high, means, least = look.seen[conv]
        mean = means.mean(0).float()
        reach = torch.maximum(high - mean, mean - low)
        scales = (reach.amax() / reach.clamp(min=math.ulp(0.0))).clamp(max=MOST)
        scales = torch.where(least > FAR * norm.eps, scales, 1.0)
        width = stream.num_channels // norm.groups
        yield stream, {conv: mean.repeat_interleave(width)}, scales.repeat_interleave(width)
