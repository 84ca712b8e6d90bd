"""Smooth activations as products with a gate, for runtimes that have the gate and the product in integers.

    silu(x) = x · sigmoid(x),    hardswish(x) = x · hardsigmoid(x)

A runtime without an integer kernel for the whole activation dequantizes, computes four bytes where there was one, and
quantizes again. The gate is a function of 256 values and the product is one multiplication, so both stay in bytes. The
gate's range is known without looking: [0, 1), quantized in steps of 1/256, so that a half is an integer exactly.

Which activations a target wants so is the target's (``Target.products``); the float reference keeps them whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import GraphModule, Node

from qtool.graphs.operators import aten
from qtool.quantization.rewrites.respell import GATES


def write_products(graph_module: GraphModule, activations: Collection[Any]) -> int:
    """Rewrites each of ``activations`` (keys of ``GATES``) in place; returns how many."""
    wanted = [node for node in graph_module.graph.nodes if node.target in activations]
    for node in wanted:
        _rewrite(node)
    graph_module.graph.lint()
    graph_module.recompile()
    return len(wanted)


def _rewrite(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    with node.graph.inserting_before(node):
        gate = node.graph.call_function(GATES[node.target], (source,))
    gate.meta = {key: value for key, value in node.meta.items() if key != "custom"}
    node.target, node.args = aten.mul.Tensor, (source, gate)
