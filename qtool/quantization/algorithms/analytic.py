"""Analytic bias correction: the shift that rounded weights cause, from batch-norm's statistics and without data.

Rounding changes a layer's mean output by ``(Ŵ − W) E[x]``. Behind a batch-norm the values of a channel are about normal
with mean β and deviation |γ|, whatever the data, and what an activation makes of a normal distribution is known:
clipped to ``a … b``, with ``φ`` and ``Φ`` the standard normal's and ``α = (a − β)/γ``, ``ω = (b − β)/γ`` (Nagel et
al., arXiv 1906.04721, section 4.2 and appendix C),

    E[x] = a·Φ(α) + b·(1 − Φ(ω)) + β·(Φ(ω) − Φ(α)) + γ·(φ(α) − φ(ω)),          b̂ = b − (Ŵ − W) E[x]

Means are carried through what keeps channels apart (average pooling, padding, reshaping); sums add means, and variances
as if their terms were independent; the mean over an image hardly varies. A layer whose inputs are not known in this way
(the first, one behind a product or a concatenation) is left, and the note says how many were. So is one whose
quantized inputs do not reach as far as its batch-norm has them reach: those of a network that was never trained have
the statistics that they were born with, and correcting by them would add the shift that it is to remove.

Left out on purpose: the shift that quantized activations cause, the border that padding makes, and everything that
data would tell: with calibration samples at hand, ``bias`` is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import quantized
from qtool.graphs.edits import parameter
from qtool.graphs.operators import ADAPTIVE_POOLS, MAX_POOLS, PADS, aten
from qtool.quantization.algorithms.bias import add_to_bias, channel_axis
from qtool.quantization.algorithms.streams import ANCHORS, keeps_channels, per_input
from qtool.quantization.algorithms.subject import Declined, NothingToDo, Subject
from qtool.quantization.limits import clip_limits
from qtool.quantization.rewrites.norms import NORMAL
from qtool.quantization.stored_weights import integers_of, scales_of
from qtool.quantization.targets import RELU_LIKE
from qtool.units import many

Normal = tuple[Tensor, Tensor]
REACH = 0.6
"""The root mean square that batch-norms tell of a tensor is at most this part of its range, where they are true."""
_UNKNOWN = (*MAX_POOLS, aten.leaky_relu.default)


@torch.no_grad()
def correct_biases_analytically(subject: Subject) -> None:
    """Corrects the bias of every integer layer whose mean inputs batch-norms tell, in place; notes how many."""
    known = distributions(subject.reference)
    anchors = {node: other for node, other in subject.anchors().items() if other.target in ANCHORS}
    fit = {node: other for node, other in anchors.items() if other.args[0] in known}
    if not fit:
        raise NothingToDo("no integer layer has a batch-norm before it")
    true = {node: other for node, other in fit.items() if _reaches(node, *known[other.args[0]])}  # type: ignore[index]
    if not true:
        raise Declined("the statistics of the batch-norms are not those of the data")
    for node, other in true.items():
        real, made = parameter(subject.reference, other.args[1]), _dequantized(subject.graph, node)
        assert real is not None
        means = per_input(real, other, known[other.args[0]][0])  # type: ignore[index]
        add_to_bias(subject.graph, node, ((real.double() - made) * means).flatten(1).sum(1))
    subject.graph.recompile()
    left = f"; {len(anchors) - len(fit)} have no batch-norm before them" if len(fit) < len(anchors) else ""
    left += f"; {len(fit) - len(true)} have one whose statistics are not the data's" if len(true) < len(fit) else ""
    subject.note(f"analytic-bias: corrected in {many(len(true), 'layer')}{left}")


def _reaches(node: Node, mean: Tensor, variance: Tensor) -> bool:
    """Whether a layer's quantized inputs go as far as values of these statistics do; so where they are in float."""
    source = node.args[0]
    assert isinstance(source, Node)
    if source.target is not quantized.dequantize_per_tensor.default:
        return True
    scale, zero, low, high = (float(str(value)) for value in source.args[1:5])
    return float((mean.square() + variance).mean().sqrt()) <= REACH * scale * max(zero - low, high - zero)


def _dequantized(graph: GraphModule, node: Node) -> Tensor:
    return integers_of(graph, node).double() * scales_of(graph, node).double()


def distributions(graph: GraphModule) -> dict[Node, Normal]:
    """Mean and variance of each channel of every value that batch-norms tell, float64."""
    found: dict[Node, Normal] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and (normal := _distribution(node, found)) is not None:
            found[node] = normal
    return found


def _distribution(node: Node, found: dict[Node, Normal]) -> Normal | None:
    if node.target in ANCHORS:
        mean, deviation = node.meta.get(NORMAL, (None, None))
        return None if mean is None else (mean.double(), deviation.double().square())
    operands = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
    sources = [found.get(operand) for operand in operands]
    if not sources or any(source is None for source in sources) or node.target in _UNKNOWN:
        return None
    first = sources[0]
    assert first is not None
    if node.target in RELU_LIKE:
        return clipped(*first, *clip_limits(node))
    axis = _axis(operands[0])
    if node.target is aten.add.Tensor and keeps_channels(node, axis):
        left, right = (found.get(operand) for operand in node.args[:2])  # type: ignore[arg-type]
        return None if left is None or right is None else (left[0] + right[0], left[1] + right[1])
    if node.target not in PADS and not keeps_channels(node, axis):
        return None
    return (first[0], torch.zeros_like(first[1])) if _is_whole_mean(node) else first


def _axis(node: Node) -> int:
    """What counts the channels of a known value: the axis of the layer that its first operands come from."""
    while node.target not in ANCHORS:
        node = node.args[0]  # type: ignore[assignment]
    return int(channel_axis(node) % node.meta["val"].dim())


def _is_whole_mean(node: Node) -> bool:
    """Whether a pooling leaves one value of a channel."""
    return node.target in (aten.mean.dim, *ADAPTIVE_POOLS) and all(size == 1 for size in node.meta["val"].shape[2:])


def clipped(mean: Tensor, variance: Tensor, low: float, high: float) -> Normal:
    """Mean and variance of normal values clipped to ``low`` … ``high``, either of which may be infinite."""
    deviation = variance.sqrt().clamp(min=1e-12)
    first, second = torch.zeros_like(mean), torch.zeros_like(mean)
    inside = torch.ones_like(mean)
    for end, sign in ((low, 1.0), (high, -1.0)):
        if math.isinf(end):
            continue
        at = (end - mean) / deviation
        beyond = 0.5 * torch.erfc(-sign * at / math.sqrt(2))
        bell = torch.exp(-at.square() / 2) / math.sqrt(2 * math.pi)
        inside = inside - beyond
        first = first + end * beyond + sign * deviation * bell
        second = second + end**2 * beyond + sign * (deviation * (mean + end)) * bell
    first = first + mean * inside
    second = second + (mean.square() + variance) * inside
    return first, (second - first.square()).clamp(min=0.0)
