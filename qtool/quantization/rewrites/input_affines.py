"""Products and sums with stored numbers in front of layers, folded into the weights that read them.

    W (f · x + h) + b = (W f) x + (W h + b),    f and h one number for each input, or one for all

A batch-norm in front of a linear layer is such an affine (the heads of LevIT and RepViT, ArcFace, most networks on
tables), and left in float it parts the integers before it from those behind it. One number for all (the gain behind an
activation where there is no batch-norm, StarReLU's two) changes no weight beside another, and goes into convolutions
too: through what moves numbers, and where h is 0 through padding with zeros and pools.

Left as it is: the affine of a float with more than one f or h, whose channels may differ by orders of magnitude (a
table's columns), one that anything but such layers reads, an h that a convolution pads with 0, and one whose readers'
weights something else reads too.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, parameter, set_parameter
from qtool.graphs.operators import ADAPTIVE_POOLS, AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, PADS, aten
from qtool.quantization.rewrites.affines import affine_at, runs_in_integers
from qtool.quantization.rewrites.norms import readers_of
from qtool.quantization.targets import MOVES, Target
from qtool.quantization.targets.base import pad_in_integers

_VIEWS = (aten.reshape.default, aten.flatten.using_ints, aten.permute.default, aten.transpose.int)
_LAYERS = (aten.linear.default, *CONVOLUTIONS[:3])
_MEANS = (*AVERAGE_POOLS, *ADAPTIVE_POOLS, aten.mean.dim)


def fold_ahead(graph_module: GraphModule, target: Target, *, vectors: bool = True) -> list[Node]:
    """Folds in place each product and sum with stored numbers that it can; returns the layers.

    With ``vectors``, those of what is integer that have a number for each input of a linear layer too.
    """
    folded: list[Node] = []
    integer: set[Node] = set()
    values = dict.fromkeys(graph_module.graph.nodes).keys()
    for node in list(values):
        if node.op != "call_function" or not node.users:
            continue
        ends = affine_at(graph_module, node, values, -1)
        if ends is not None and (_is_one_for_all(*ends[2:]) or (vectors and ends[1] in integer)):
            folded += _fold_into_readers(graph_module, *ends)
        elif runs_in_integers(node, target, integer) or (node.target in _VIEWS and node.args[0] in integer):
            integer.add(node)
    if folded:
        clean(graph_module)
    return folded


def _is_one_for_all(factor: Tensor, shift: Tensor) -> bool:
    return len(factor) == len(shift) == 1


def _fold_into_readers(
    graph_module: GraphModule, last: Node, source: Node, factor: Tensor, shift: Tensor
) -> list[Node]:
    """Folds ``last``, which is ``factor · source + shift``, into all the layers that read it, or into none."""
    layers, readers = layers_behind(last, factor, shift), readers_of(graph_module)
    if layers is None or not all(_takes_in(layer, shift, readers) for layer in layers):
        return []
    for layer in layers:
        fold(graph_module, layer, factor, shift)
    last.replace_all_uses_with(source)
    return layers


def layers_behind(node: Node, factor: Tensor, shift: Tensor) -> list[Node] | None:
    """The layers whose input is a value alone, moved or pooled on the way; None where anything else reads it."""
    kinds = _LAYERS if _is_one_for_all(factor, shift) else (aten.linear.default,)
    found: list[Node] = []
    for user in node.users:
        if user.target in kinds and node not in user.args[1:]:
            found.append(user)
        elif user.users and user.args[:1] == (node,) and _keeps(user, factor, shift):
            behind = layers_behind(user, factor, shift)
            if behind is None:
                return None
            found += behind
        else:
            return None
    return found


def _keeps(node: Node, factor: Tensor, shift: Tensor) -> bool:
    """Whether an operator gives as well ``factor · y + shift`` of ``factor · x + shift`` as y of x."""
    if not _is_one_for_all(factor, shift):
        return False
    if node.target in MOVES:
        return True
    if shift.any():
        return False
    if node.target in PADS:
        return not pad_in_integers(node)
    return node.target in _MEANS or (node.target in MAX_POOLS and bool(factor > 0))


def _takes_in(layer: Node, shift: Tensor, readers: dict[str, int]) -> bool:
    return owns_weights(layer, readers) and not (shift.any() and _pads(layer))


def owns_weights(layer: Node, readers: dict[str, int]) -> bool:
    """Whether the weight and the bias of a layer are stored ones that nothing else reads; see ``readers_of``."""
    stored = [value for value in layer.args[1:3] if value is not None]
    return all(
        isinstance(value, Node) and value.op == "get_attr" and readers[str(value.target)] == 1 for value in stored
    )


def _pads(layer: Node) -> bool:
    """Whether a layer is a convolution that pads with zeros what it reads."""
    padding = layer.args[4] if len(layer.args) > 4 else ()
    return layer.target is not aten.linear.default and any(padding)  # type: ignore[arg-type]


def fold(graph_module: GraphModule, layer: Node, factor: Tensor, shift: Tensor) -> None:
    """Gives a layer that is to read ``x`` the weights with which it computes what it did of ``factor · x + shift``.

    Both are one number for each input, or one for all; the layer pads with nothing that ``shift`` would be missed in.
    """
    weight_node = layer.args[1]
    assert isinstance(weight_node, Node)
    weight = parameter(graph_module, weight_node)
    bias = parameter(graph_module, layer.args[2]) if len(layer.args) > 2 else None
    assert weight is not None
    wide, path = weight.detach().double(), str(weight_node.target)
    by_input = [-1] + [1] * (wide.dim() - 2)
    factor, shift = factor.double().reshape(by_input), shift.double().reshape(by_input)
    more = (wide * shift).flatten(1).sum(1)
    sum_ = more if bias is None else more + bias.detach().double()
    set_parameter(graph_module, path, (wide * factor).to(weight.dtype), like=path)
    if bias is None and not shift.any():
        return
    name = str(layer.args[2].target) if bias is not None else f"{layer.name}_input_shift"  # type: ignore[union-attr]
    set_parameter(graph_module, name, sum_.to(weight.dtype), like=path)
    if bias is None:
        with layer.graph.inserting_before(layer):
            stored = layer.graph.get_attr(name)
        stored.meta["val"] = layer.meta["val"].new_empty([weight.shape[0]])
        layer.args = (layer.args[0], weight_node, stored, *layer.args[3:])
