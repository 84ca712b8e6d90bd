"""Products and sums with stored numbers in front of linear layers, folded into the weights that read them.

    W (f · x + h) + b = (W f) x + (W h + b),    f and h one number for each input, or one for all

A batch-norm in front of a linear layer is such an affine (the heads of LevIT and RepViT, ArcFace, most networks on
tables), and left in float it parts the integers before it from those behind it.

Left as it is: the affine of a float with more than one f or h, whose channels may differ by orders of magnitude (a
table's columns), one that anything but linear layers reads, and one whose readers' weights something else reads too.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.quantization.capture import aten, clean, parameter, set_parameter
from qtool.quantization.rewrites.affines import affine_at, runs_in_integers
from qtool.quantization.rewrites.norms import readers_of
from qtool.quantization.targets import Target

_VIEWS = (aten.reshape.default, aten.flatten.using_ints, aten.permute.default, aten.transpose.int)


def fold_ahead(graph_module: GraphModule, target: Target) -> list[Node]:
    """Folds in place each product and sum with stored numbers of what is integer that it can; returns the layers."""
    folded: list[Node] = []
    integer: set[Node] = set()
    values = dict.fromkeys(graph_module.graph.nodes).keys()
    for node in list(values):
        if node.op != "call_function" or not node.users:
            continue
        ends = affine_at(graph_module, node, values, -1)
        if ends is not None and (ends[1] in integer or len(ends[2]) == len(ends[3]) == 1):
            folded += _fold_into_readers(graph_module, *ends)
        elif runs_in_integers(node, target, integer) or (node.target in _VIEWS and node.args[0] in integer):
            integer.add(node)
    if folded:
        clean(graph_module)
    return folded


def _fold_into_readers(
    graph_module: GraphModule, last: Node, source: Node, factor: Tensor, shift: Tensor
) -> list[Node]:
    """Folds ``last``, which is ``factor · source + shift``, into all the layers that read it, or into none."""
    layers, readers = list(last.users), readers_of(graph_module)
    if not all(_takes_in(layer, last, readers) for layer in layers):
        return []
    width = last.meta["val"].shape[-1]
    for layer in layers:
        _fold(graph_module, layer, factor.expand(width), shift.expand(width))
    last.replace_all_uses_with(source)
    return layers


def _takes_in(layer: Node, affine: Node, readers: dict[str, int]) -> bool:
    stored = [value for value in layer.args[1:3] if value is not None]
    return (
        layer.target is aten.linear.default
        and layer.args[0] is affine
        and all(isinstance(value, Node) and value.op == "get_attr" for value in stored)
        and all(readers[str(value.target)] == 1 for value in stored if isinstance(value, Node))
    )


def _fold(graph_module: GraphModule, layer: Node, factor: Tensor, shift: Tensor) -> None:
    weight_node = layer.args[1]
    assert isinstance(weight_node, Node)
    weight = parameter(graph_module, weight_node)
    bias = parameter(graph_module, layer.args[2]) if len(layer.args) > 2 else None
    assert weight is not None
    wide, path = weight.detach().double(), str(weight_node.target)
    more = wide @ shift
    sum_ = more if bias is None else more + bias.detach().double()
    set_parameter(graph_module, path, (wide * factor).to(weight.dtype), like=path)
    name = str(layer.args[2].target) if bias is not None else f"{layer.name}_input_shift"  # type: ignore[union-attr]
    set_parameter(graph_module, name, sum_.to(weight.dtype), like=path)
    if bias is None:
        with layer.graph.inserting_before(layer):
            stored = layer.graph.get_attr(name)
        stored.meta["val"] = layer.meta["val"].new_empty([weight.shape[0]])
        layer.args = (layer.args[0], weight_node, stored)
