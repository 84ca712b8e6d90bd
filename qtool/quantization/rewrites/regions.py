"""Regions of a model that turn autocast off or gradients on, written as the operators in them.

``with torch.autocast(device, enabled=False):`` is how models keep a part in float32. ``torch.export`` captures such a
region as one call of a subgraph, whose operators no pattern sees, and so it does with one that turns autocast on for a
device that is not there, or gradients on (``with torch.set_grad_enabled(self.tuned):``), since it captures without. In
a graph of float32 on the CPU these operators mean what they mean outside of it: the call is replaced by them.

Left as it is on purpose: a region that turns autocast on for the CPU, whose numbers have 16 bits, and
which ``capture.py`` refuses.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_regions(graph_module: GraphModule) -> None:
    """Replaces in place each region without effect on a graph on the CPU, those within it included."""
    found = [node for node in graph_module.graph.nodes if node.target in (_AUTOCAST, _GRADIENTS)]
    for node in found:
        place = _HELD[node.target]
        mode, held, operands = node.args[:place], node.args[place], node.args[place + 1 :]
        region = getattr(graph_module, str(held.target))
        inline_regions(region)
        own = any(inner.op in ("get_attr", "call_module") for inner in region.graph.nodes)
        if not own and not (node.target is _AUTOCAST and mode[2] and mode[0] == "cpu"):
            _inline(node, region, operands)
    if found:
        graph_module.graph.eliminate_dead_code()
        graph_module.delete_all_unused_submodules()
        graph_module.recompile()


_HELD = {_AUTOCAST: 4, _GRADIENTS: 1}
"""Which argument of a region is its subgraph."""


def _inline(node: Node, region: GraphModule, operands: Sequence[Node]) -> None:
    inputs = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(region.graph, dict(zip(inputs, operands, strict=True)))
    assert isinstance(results, tuple | list)
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]  # type: ignore[index]
        assert isinstance(result, Node)
        user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
