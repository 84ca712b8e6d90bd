"""Raw inputs: what layers read of them is given a product for each channel, whose factors ``smooth`` then chooses.

The columns of a table, or the sensors of a series, have units, and one of them is a thousand times as large as another,
or has a tail: the others have hardly a step. A model has no norm there that could take factors, so it is given a
product with ones between what it is fed, normalised, taken apart or joined with others before, and the layers that read
it. Where nothing was chosen for it, it is taken away again. Left out on purpose: images, whose channels have one unit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.graphs.edits import parameter, set_parameter
from qtool.graphs.operators import aten
from qtool.quantization.algorithms.places import MOVES, PARTS, TURNS, axis_of, reads, rounded_weights, vectors
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.residence import device_of
from qtool.quantization.rewrites.affines import affine_at


def give_products(subject: Subject) -> dict[Node, Node]:
    """Multiplies what integer layers read of the inputs, or saved factors are for, by ones: product → what it is of."""
    products: dict[Node, Node] = {}
    raw: set[Node] = set()
    graph, integer = subject.graph, set(rounded_weights(subject))
    saved = subject.ranges if subject.config.ranges_from is not None else {}
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or not _is_raw(graph, node, raw):
            continue
        raw.add(node)
        for axis in range(value.dim() - 1, 0, -1) if value.dim() in (2, 3) else ():
            layers = [user for user in node.users if user.args[0] is node and reads(user, axis)]
            fit = integer.issuperset(layers) or _product_name(node) in saved
            several = isinstance(value.shape[axis], int) and value.shape[axis] > 1
            if layers and fit and several and not (vectors(node) and axis_of(node) == axis):
                products[_multiply(graph, node, axis, layers)] = node
    if products:
        subject.place_anew()
    return products


def _is_raw(graph: GraphModule, node: Node, raw: set[Node]) -> bool:
    """Whether a node is an input of the model, or moves, joins or normalises some of ``raw``."""
    if node.op == "placeholder" or raw.isdisjoint(node.all_input_nodes):
        return node.op == "placeholder"
    if node.target in (*PARTS, *TURNS, *MOVES, aten.cat.default, aten.to.dtype):
        return True
    return any(affine_at(graph, node, raw, axis, whole=True) is not None for axis in (-1, 1))


def _product_name(node: Node) -> str:
    return f"{node.name}_columns"


def _multiply(graph: GraphModule, node: Node, axis: int, layers: list[Node]) -> Node:
    """A product of each channel with 1 between a node and these of its readers."""
    value, name = node.meta["val"], _product_name(node)
    ones = torch.ones([value.shape[axis]] + [1] * (value.dim() - 1 - axis), device=device_of(graph))
    set_parameter(graph, f"{name}_scale", ones)
    with graph.graph.inserting_after(node):
        stored = graph.graph.get_attr(f"{name}_scale")
    stored.meta["val"] = value.new_empty(ones.shape)
    with graph.graph.inserting_after(stored):
        product = graph.graph.create_node("call_function", aten.mul.Tensor, (node, stored), name=name)
    product.meta |= {**node.meta, "val": value}
    for layer in layers:
        layer.update_arg(0, product)
    return product


def take_back(subject: Subject, products: Mapping[Node, Node]) -> None:
    """Takes away the products that are by 1 still."""
    graph = subject.graph
    for product, node in products.items():
        stored = product.args[1]
        value = parameter(graph, stored)
        assert isinstance(stored, Node)
        assert value is not None
        if bool((value == 1).all()):
            product.replace_all_uses_with(node)
            graph.graph.erase_node(product)
            graph.graph.erase_node(stored)
            delattr(graph, str(stored.target))
    if products:
        subject.place_anew()
    graph.recompile()
