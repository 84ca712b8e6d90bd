"""Absorption: the constant part of a channel is moved into the biases of the layers that read it.

A tensor has one scale and one zero point; a channel that lies from 3 to 4 beside one from −1 to 1 stretches the range
and uses a fifth of it. Shifting channels by ``m`` where they are made, ``b' = b − m``, and back where they are read,
``b' = b + Σ w·m``, changes nothing that is computed, where nothing between depends on where zero is:

* on a path without activations (the residual path of an inverted-residual net) each producer is shifted by the
  middle of its range, a sum being shifted by the sum (a static form of arXiv 2304.09145);
* before a ReLU, a channel is shifted by its least value where that was positive, so that the ReLU never acts on it
  (high-bias absorption, arXiv 1906.04721, with what was seen in place of ``β − 3γ``).

Readers that pad with zeros would see the shift end at the border: a path with such a reader is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.operators import AVERAGE_POOLS, CONVOLUTIONS, aten
from qtool.quantization.algorithms.bias import add_to_bias
from qtool.quantization.algorithms.streams import Stream, input_sums, pads_zeros
from qtool.quantization.rewrites.norms import NORMAL

_RELUS = (aten.relu.default, aten.clamp_min.default)
_ADDS = (aten.add.Tensor,)


def shifts(stream: Stream, lowest: dict[Node, Tensor], middle: dict[Node, Tensor]) -> dict[Node, Tensor]:
    """The shift of each value of a stream by channel; empty where the stream allows none.

    ``lowest`` and ``middle`` give the least value seen of each channel and the middle of its range.
    """
    if stream.caps or any(map(_pads, [*stream.consumers, *stream.values])):
        return {}
    curved = [v for v in stream.values if v.target in _RELUS or v.target is aten.leaky_relu.default]
    if not curved:
        return carried(stream, {p: middle[p] for p in stream.producers})
    if len(stream.producers) > 1 or len(curved) > 1 or curved[0].target not in _RELUS:
        return {}
    (producer,) = stream.producers
    least = lowest[producer].clamp(min=0.0)
    if curved[0].args[0] is not producer or list(producer.users) != [curved[0]] or not bool(least.any()):
        return {}
    return carried(stream, {producer: least})


def carried(stream: Stream, made: dict[Node, Tensor]) -> dict[Node, Tensor]:
    """The shifts of all values, from those of the producers."""
    found = dict(made)
    for value in sorted(stream.values, key=list(stream.values[0].graph.nodes).index):
        if value not in found:
            operands = [found[o] for o in value.args[:2] if isinstance(o, Node)]
            found[value] = operands[0] + operands[1] if value.target in _ADDS else operands[0]
    return found


def _pads(node: Node) -> bool:
    """Whether an operator reads zeros beyond the border, or puts them there."""
    if pads_zeros(node):
        return True
    index = 4 if node.target in CONVOLUTIONS else 3 if node.target in AVERAGE_POOLS else None  # a maximum pads with −∞
    padding = node.args[index] if index is not None and len(node.args) > index else 0
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


@torch.no_grad()
def shift(graph: GraphModule, stream: Stream, moved: dict[Node, Tensor]) -> None:
    """Subtracts the shifts where channels are made and gives them back where they are read, in place."""
    for node in dict.fromkeys(stream.producers):
        add_to_bias(graph, node, -moved[node].double())
        if NORMAL in node.meta:
            mean, deviation = node.meta[NORMAL]
            node.meta[NORMAL] = mean - moved[node], deviation
    for node in dict.fromkeys(stream.consumers):
        add_to_bias(graph, node, input_sums(graph, node, moved[node.args[0]].double()))  # type: ignore[index]
