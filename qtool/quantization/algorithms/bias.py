"""Bias correction: what quantization adds to a layer's mean output is taken out of its bias again.

Rounding weights shifts the mean of every output channel, clipping activations shifts it too, and shifts add up with
depth. For each layer in order, with ``x`` its inputs in the float model and ``x̂`` its quantized inputs,

    b̂ = b + E[w·x + b] − E[ŵ·x̂ + b]

over all samples and positions (Nagel et al., arXiv 1906.04721, the empirical form). ``x̂`` comes out of layers that are
corrected already: corrected all at once, each layer would also remove the shifts that those before it no longer make,
and the result diverges.

The cost is one float pass for the first mean and one walk through the quantized graph, both over ``SAMPLES`` samples at
most. Both means are of the same samples, so that what differs between samples drops out of their difference and few
tell it: of 512, a ResNet-20 came to 37.9, 38.5, 38.7, 38.7 and 38.6 dB at its logits with 32, 64, 128, 256 and all. The
second mean needs no convolution of its own: a layer is linear, so the mean of its outputs is its output for the mean of
its inputs.

A corrected bias is saved beside the layer's range, so that a quantization that is repeated from saved ranges needs no
samples for it: it is taken as it is where the layer's integers are the same.

Left out on purpose: biases after an activation (a layer's own bias is all that an integer kernel adds). The analytic
form, which needs no samples but normal inputs, is in ``analytic.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.errors import QtoolError
from qtool.graphs.edits import owner, parameter, set_parameter
from qtool.graphs.operators import aten
from qtool.nested import thinned
from qtool.quantization.algorithms.subject import Declined, Subject, saved_numbers
from qtool.quantization.algorithms.walk import Segment, Walk, execute, interpret
from qtool.quantization.residence import device_of
from qtool.quantization.stored_weights import dequantize_of
from qtool.units import many

SAMPLES = 128
"""How many samples the means are taken over, where there are so many."""


def correct_biases(subject: Subject) -> None:
    """Corrects the bias of every integer convolution and linear layer, in order, in place; notes how many."""
    anchors = subject.anchors()
    if not anchors:
        raise Declined("no convolution or linear layer is integer")
    saved = {node: subject.ranges.get(str(node.meta["unit"]), {}) for node in anchors}
    if subject.config.ranges_from is not None and take_biases(subject.graph, saved):
        subject.note(f"bias: as saved with the ranges in {many(len(anchors), 'layer')}")
        return
    batches = thinned(subject.batches, SAMPLES)
    if not batches:
        raise Declined("no calibration samples")
    wanted = mean_outputs(subject.reference, set(anchors.values()), batches)
    with Walk(subject.graph, batches, layers=anchors) as walk:
        for segment in walk.segments:
            for node in segment.nodes:
                if node in anchors:
                    _correct(walk, segment, node, wanted[anchors[node]])
            walk.advance(segment)
    subject.graph.recompile()
    for node in anchors:
        note_bias(subject, node)
    subject.note(f"bias: corrected in {many(len(anchors), 'layer')}")


def bias_entry(graph: GraphModule, node: Node) -> dict[str, Any]:
    """What is saved of a layer's bias, and of the integers that it belongs to."""
    return {"bias": bias_of(graph, node).tolist(), "weight": _digest(graph, node)}


def note_bias(subject: Subject, node: Node) -> None:
    """Saves a layer's bias beside its range."""
    subject.ranges.setdefault(str(node.meta["unit"]), {}).update(bias_entry(subject.graph, node))


def take_biases(graph: GraphModule, saved: Mapping[Node, Mapping[str, Any]]) -> bool:
    """Gives every layer the bias that was saved; changes nothing and is False unless all were, for these weights.

    Raises UsageError for a bias of other than the layer's channels.
    """
    if any(entry.get("weight") != _digest(graph, node) for node, entry in saved.items()):
        return False
    for node, entry in saved.items():
        channels = node.meta["val"].shape[channel_axis(node)]
        set_bias(graph, node, saved_numbers("bias", str(node.meta["unit"]), entry.get("bias"), channels))
    graph.recompile()
    return True


def _digest(graph: GraphModule, node: Node) -> int:
    """A number that tells a layer's integers and their scales from others."""
    values = [parameter(graph, part) for part in dequantize_of(node).args[:2]]
    return zlib.crc32(b"".join(value.cpu().contiguous().numpy().tobytes() for value in values if value is not None))


def channel_axis(node: Node) -> int:
    """The axis of a layer's output that counts its channels: the last of a linear layer, the second otherwise."""
    return -1 if node.target is aten.linear.default else 1


class _Mean:
    """A mean over all but one axis, its parts added in float64."""

    def __init__(self, axis: int) -> None:
        self.axis, self.total, self.weight = axis, torch.zeros(()), 0

    def add(self, value: Tensor, weight: int = 1) -> None:
        """Adds a tensor each of whose values stands for ``weight``."""
        axis = self.axis % value.dim()
        count = value.numel() // value.shape[axis] * weight
        self.total = self.total + value.mean([d for d in range(value.dim()) if d != axis]).double() * count
        self.weight += count

    def value(self) -> Tensor:
        """The mean of each index of the axis."""
        return self.total / self.weight


class _Watch(Interpreter):
    """Runs a graph and adds the outputs of some nodes to their means."""

    def __init__(self, graph: GraphModule, means: dict[Node, _Mean]) -> None:
        super().__init__(graph)
        self.means = means

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.means:
            self.means[n].add(result)
        return result


@torch.no_grad()
def mean_outputs(graph: GraphModule, nodes: Iterable[Node], batches: Iterable[Any]) -> dict[Node, Tensor]:
    """The mean output of each channel of some nodes over all batches, float64: one forward pass."""
    means = {node: _Mean(channel_axis(node)) for node in nodes}
    watch = _Watch(graph, means)
    for batch in batches:
        interpret(watch, batch)
    return {node: mean.value() for node, mean in means.items()}


@torch.no_grad()
def _correct(walk: Walk, segment: Segment, node: Node, wanted: Tensor) -> None:
    means = walk.means(segment, source_of(node))
    add_to_bias(walk.graph, node, wanted - mean_output(walk, node, means))


@torch.no_grad()
def mean_output(walk: Walk, node: Node, means: Iterable[tuple[Tensor, int]]) -> Tensor:
    """The mean output of each channel of a layer, float64, for mean inputs and of how many samples each of these is."""
    mean, source = _Mean(channel_axis(node)), source_of(node)
    for value, count in means:

        def at(n: Node, value: Tensor = value) -> Any:
            return value if n is source else walk.constant(n)

        mean.add(execute(walk.graph, node, at), count)
    return mean.value()


def source_of(layer: Node) -> Node:
    """The value that a convolution or linear layer reads."""
    source = layer.args[0]
    assert isinstance(source, Node)
    return source


def add_to_bias(graph: GraphModule, node: Node, change: Tensor) -> None:
    """Adds ``change``, one value per channel, to the bias of a convolution or linear layer, and of that one alone."""
    set_bias(graph, node, change + bias_of(graph, node))


def bias_of(graph: GraphModule, node: Node) -> Tensor:
    """The bias of a convolution or linear layer, float64; 0 where it has none."""
    stored = parameter(graph, node.args[2]) if len(node.args) > 2 else None
    return torch.zeros((), dtype=torch.float64) if stored is None else stored.double()


def set_bias(graph: GraphModule, node: Node, value: Tensor) -> None:
    """Gives a convolution or linear layer, and that one alone, another bias: one value per channel.

    Raises QtoolError where a value is not finite: with weights alone in integers, no range was read that would tell.
    """
    if not value.isfinite().all():
        raise QtoolError(
            f"layer '{owner(node) or node.name}'", "finite outputs to correct its bias by", "NaN or infinity",
            "check the calibration data, and the weights of the layers before it",
        )  # fmt: skip
    before = node.args[2] if len(node.args) > 2 else None
    name = f"{node.name}_corrected_bias"
    set_parameter(graph, name, value.float().to(device_of(graph)))  # a saved one comes from the host
    with graph.graph.inserting_before(node):
        stored = graph.graph.get_attr(name)
    if isinstance(before, Node):
        stored.meta = dict(before.meta)
    node.args = (*node.args[:2], stored, *node.args[3:])
