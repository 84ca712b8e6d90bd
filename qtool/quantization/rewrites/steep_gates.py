"""Gates that are steeper than SiLU's, written as SiLU between two layers that take the factor in.

    x · sigmoid(β x) = silu(β x) / β

is CLIP's GELU (β = 1.702), or a Swish that learned its β (arXiv 1710.05941). The product β x has no integer kernel: it
would part the layers, or be a convolution with a rounding of its own. The layer before takes β in (``scales.py``), and
those behind 1 / β (``input_affines.py``), so that nothing is left of it. The float reference keeps it: runtimes have a
kernel for the whole of it in float.

Left as it is: what does not stand between layers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean
from qtool.graphs.operators import CONVOLUTIONS, aten
from qtool.quantization.rewrites.input_affines import layers_behind, owns_weights
from qtool.quantization.rewrites.norms import readers_of
from qtool.quantization.rewrites.scales import stored_numbers

_LAYERS = (*CONVOLUTIONS, aten.linear.default)


def write_steep_gates(graph_module: GraphModule) -> int:
    """Rewrites in place; returns how many gates."""
    readers, changed = readers_of(graph_module), 0
    for product in list(graph_module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        ends = _ends(product)
        if ends is None or not owns_weights(ends[0], readers):
            continue
        factor = _factor(graph_module, *ends)
        behind = layers_behind(product, factor, torch.zeros(1)) if factor is not None else None
        if factor is not None and behind and all(owns_weights(layer, readers) for layer in behind):
            _rewrite(product, ends[1], factor)
            changed += 1
    if changed:
        clean(graph_module)
    return changed


def _ends(product: Node) -> tuple[Node, Node] | None:
    """The layer that a gate and a product with it alone read, and what the gate is the sigmoid of; None elsewhere."""
    for source, gate in (product.args[:2], product.args[1::-1]):
        if not isinstance(source, Node) or not isinstance(gate, Node) or gate.target is not aten.sigmoid.default:
            continue
        steep = gate.args[0]
        if not isinstance(steep, Node) or steep.target is not aten.mul.Tensor or source not in steep.args:
            continue
        alone = set(steep.users) == {gate} and set(gate.users) == {product} and set(source.users) == {steep, product}
        if alone and source.target in _LAYERS:
            return source, steep
    return None


def _factor(graph_module: GraphModule, source: Node, steep: Node) -> Tensor | None:
    """The one number, not 0, that ``source`` is multiplied by; None where it is another."""
    other = steep.args[1] if steep.args[0] is source else steep.args[0]
    numbers = stored_numbers(graph_module, other, source.meta["val"], None)
    return numbers if numbers is not None and len(numbers) == 1 and bool(numbers != 0) else None


def _rewrite(product: Node, steep: Node, factor: Tensor) -> None:
    product.target, product.args = aten.silu.default, (steep,)
    with product.graph.inserting_after(product):
        made = product.graph.call_function(aten.mul.Tensor, (product, 1 / float(factor)))
    made.meta = {key: value for key, value in product.meta.items() if key != "custom"}
    product.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
