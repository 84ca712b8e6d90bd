"""Positions and time steps: numbers of which sines are taken, or indices made, and which 16 bits are too few for.

Half precision rounds x by up to |x|/2048 and bfloat16 by |x|/256. Sine and cosine of x change by as much: of a
diffusion model's time step of 999, or of a token's position in a long text, nothing is left. An index is another one
where log(16/8)/log(16) · 8 is a little less than 2 (T5's distances between tokens). And of inputs about 5,000 that vary
by 10, a price or a temperature, little is left where a model takes their mean off. So what is computed of a model's
inputs and constants alone, and ends so, stays in float32, which costs nothing: these are small tensors. On the way to
an angle one product is allowed (rotary frequencies · positions, random Fourier features). What layers have made (SIREN,
Snake's activation) was rounded before, and is rounded like any other value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.operators import aten, packet_of

_N = TypeVar("_N")

_ENDS = (aten.sin, aten.cos, aten.tan)
_DIFFERENCES = (aten.sub, aten.rsub)
_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum)
_LAYERS = (
    aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d,
    aten.convolution, aten.layer_norm, aten.group_norm, aten.instance_norm, aten.batch_norm, aten.rms_norm,
    aten._native_batch_norm_legit_no_training, aten.scaled_dot_product_attention, aten.lstm, aten.gru, aten.rnn_tanh,
    aten.rnn_relu, aten.embedding, aten.embedding_bag,
)  # fmt: skip


def lasting(
    nodes: Iterable[_N], reads: Callable[[_N], Iterable[_N]], end: Callable[[_N], int], product: Callable[[_N], bool],
    layer: Callable[[_N], bool],
) -> set[_N]:  # fmt: skip
    """The nodes that are to stay in float32: the ends below which no layer is, and all that these are computed of.

    Of products there are fewer than ``end`` says of an end; it is 0 for all others. ``nodes`` come in an order in which
    each stands behind those that it ``reads``.
    """
    depths: dict[_N, int] = {}  # of products; 2 is that of a layer
    sources: dict[_N, list[_N]] = {}
    kept: set[_N] = set()
    for node in nodes:
        sources[node] = list(reads(node))
        below = max((depths[source] for source in sources[node]), default=0)
        depths[node] = 2 if layer(node) else below + product(node)
        waiting = [node] if depths[node] < end(node) else []
        while waiting:
            if (one := waiting.pop()) not in kept:
                kept.add(one)
                waiting += sources[one]
    return kept


def positions(graph: GraphModule) -> set[Node]:
    """The nodes of a captured graph that are to stay in float32, the inputs and constants among them."""

    def end(node: Node) -> int:
        whole = _is_float(node) is False and any(map(_is_float, node.all_input_nodes))
        return 2 if packet_of(node) in _ENDS else int(whole or packet_of(node) in _DIFFERENCES)

    return lasting(graph.graph.nodes, lambda node: node.all_input_nodes, end, is_product, is_layer)


def is_product(node: Node) -> bool:
    """Whether a node multiplies matrices."""
    return packet_of(node) in _PRODUCTS


def is_layer(node: Node) -> bool:
    """Whether a node is a layer of another kind, or rounds to integers."""
    quantizes = getattr(node.target, "namespace", None) == "quantized_decomposed"
    return node.op == "call_module" or quantizes or packet_of(node) in _LAYERS


def _is_float(node: Node) -> bool | None:
    """Whether a node is a tensor of floats, or one of integers or truth values; None of what is no tensor."""
    value = node.meta.get("val")
    return value.is_floating_point() if isinstance(value, Tensor) else None
