"""Importance: how much an error in each channel of a value moves the network's outputs.

With J the derivative of the outputs ``f`` by a value ``y``, an error e of y makes an error of about ‖J e‖² there. For
errors that are independent this is Σ e² · diag(JᵀJ), and for random signs v

    diag(JᵀJ) = E[(∂(v·f)/∂y)²]

so that one backward pass per batch gives the diagonal for every value at once (the Gauss-Newton form of BRECQ's Fisher
weights, arXiv 2102.05426, of the squared error at the outputs rather than of a task's loss, which needs no labels).
The mean over samples and positions of a channel is what is kept.

The first ``SAMPLES`` calibration samples are enough for a mean. Left out on purpose: what errors of two channels do
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.nested import num_samples, tensors
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.outputs import tapped

SAMPLES = 128


class _Tapped(Interpreter):
    """Runs a graph and keeps the values of some nodes, with gradients from the first of them on."""

    def __init__(self, graph: GraphModule, nodes: Iterable[Node]) -> None:
        super().__init__(graph)
        self.nodes, self.values = set(nodes), dict[Node, Tensor]()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n not in self.nodes:
            return result
        self.values[n], passed = tapped(result)
        return passed


@torch.enable_grad()
def importance(graph: GraphModule, axes: Mapping[Node, int], batches: Iterable[Any]) -> dict[Node, Tensor]:
    """The importance of each channel of each node of ``axes``, which gives the axis that counts channels."""
    found = {node: torch.zeros(()) for node in axes}
    seen = 0
    for batch in batches:
        tapped = _Tapped(graph, axes)
        results = [value for value in tensors(interpret(tapped, batch)) if value.requires_grad]
        draw = torch.Generator().manual_seed(seen)
        signs = [(torch.rand(value.shape, generator=draw) < 0.5).to(value) * 2 - 1 for value in results]
        values = list(tapped.values.values())
        gradients = torch.autograd.grad(results, values, signs, allow_unused=True)
        for node, gradient in zip(tapped.values, gradients, strict=True):
            if gradient is not None:
                found[node] = found[node] + _by_channel(gradient.square(), axes[node])
        seen += num_samples(batch)
        if seen >= SAMPLES:
            break
    return found


def _by_channel(value: Tensor, axis: int) -> Tensor:
    """The mean of each channel."""
    return value.mean([dim for dim in range(value.dim()) if dim != axis % value.dim()])
