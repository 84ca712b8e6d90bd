"""A learned slope that is one for all channels is a leaky ReLU, which runtimes have an integer kernel for.

    prelu(x) = max(x, 0) + a · min(x, 0) = leaky_relu(x, a)

``nn.PReLU`` holds one slope unless told otherwise. In a graph that is not trained any more, it is a number: in integers
the activation is a table of 256 then, or part of the convolution before it; so it is in quantization-aware training,
unless batch-norm trains there, and it with that. Where channels have slopes of their own, no
runtime here has an integer kernel, and it stays as it is.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from qtool.graphs.edits import clean, parameter
from qtool.graphs.operators import aten


def write_slopes(graph_module: GraphModule) -> int:
    """Rewrites each ``prelu`` of one slope in place; returns how many."""
    found = [node for node in graph_module.graph.nodes if node.target is aten.prelu.default]
    written = [node for node in found if _rewrite(graph_module, node)]
    if written:
        clean(graph_module)
    return len(written)


def _rewrite(graph_module: GraphModule, node: Node) -> bool:
    slopes = parameter(graph_module, node.args[1])
    if slopes is None or bool((slopes != slopes.flatten()[0]).any()):
        return False
    node.target, node.args = aten.leaky_relu.default, (node.args[0], float(slopes.flatten()[0]))
    return True
