"""An activation that clips goes before what only compares or moves numbers, into the layer that makes them.

    relu(max_pool(conv(x))) = max_pool(relu(conv(x))),

number for number, since clipping keeps their order: so it is for a reshape, a slice, a nearest upsampling, a pixel
shuffle, and in training for a dropout, whose factors are never negative, before a ReLU.
Behind the layer, the range of its quantizer clips, and nothing is left to compute. Behind the pool it would be a
quantizer of its own, and ONNX Runtime makes one of that and the pool's: the pool then has another scale than its
input, and runs in float.

Left out on purpose: the engine ``torch.ao``, which prepares the model's own modules in their order.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean
from qtool.graphs.operators import CONVOLUTIONS, MAX_POOLS, aten
from qtool.quantization.targets import RELU_LIKE
from qtool.quantization.targets.base import UPSAMPLES

_ORDERLY = (
    *MAX_POOLS, *UPSAMPLES, aten.pixel_shuffle.default, aten.flatten.using_ints, aten.reshape.default,
    aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.squeeze.dim, aten.unsqueeze.default,
    aten.contiguous.default,
)  # fmt: skip
_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default)
_LAYERS = (*CONVOLUTIONS, aten.linear.default, aten.batch_norm.default, aten.add.Tensor)


def clip_early(graph_module: GraphModule) -> int:
    """Moves such activations in place; returns how many."""
    moved = [node for node in list(graph_module.graph.nodes) if node.target in RELU_LIKE and _move(node)]
    if moved:
        clean(graph_module)
    return len(moved)


def _move(node: Node) -> bool:
    first, source = None, node.args[0]
    passes = (*_ORDERLY, *_DROPOUTS) if node.target is aten.relu.default else _ORDERLY
    while isinstance(source, Node) and source.target in passes and len(source.users) == 1:
        first, source = source, source.args[0]
    if first is None or not isinstance(source, Node) or source.target not in _LAYERS:
        return False
    behind = node.args[0]
    with node.graph.inserting_before(first):
        clipped = node.graph.call_function(node.target, (source, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
    clipped.meta = {**node.meta, "val": source.meta["val"]}
    first.update_arg(0, clipped)
    node.replace_all_uses_with(behind)  # type: ignore[arg-type]
    node.graph.erase_node(node)
    return True
