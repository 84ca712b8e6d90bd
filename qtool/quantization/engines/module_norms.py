"""Batch-norm in modules: what ``norms.py`` does to captured graphs, for an engine that starts from modules.

The sums are the same, in the same order and in float64, so that both engines quantize the same weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.graphs.edits import owner, parameter
from qtool.graphs.operators import aten

_CONVOLUTIONS = {aten.conv1d.default: nn.Conv1d, aten.conv2d.default: nn.Conv2d, aten.conv3d.default: nn.Conv3d}


def folded(root: Any, norm: Any) -> nn.Module:
    """A copy of a convolution or linear layer with the batch-norm behind it folded in."""
    made = copy.deepcopy(root)
    factor = 1.0 / torch.sqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        factor = norm.weight.detach().double() * factor
    bias = -norm.running_mean.double() * factor
    if norm.bias is not None:
        bias = bias + norm.bias.detach().double()
    if root.bias is not None:
        bias = bias + root.bias.detach().double() * factor
    weight = root.weight.detach().double() * factor.reshape(-1, *[1] * (root.weight.dim() - 1))
    made.weight = nn.Parameter(weight.to(root.weight.dtype))
    made.bias = nn.Parameter(bias.to(root.weight.dtype))
    return made  # type: ignore[no-any-return]


class Affine(nn.Module):
    """``x·weight + bias``: what a batch-norm of vectors comes to."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` scaled and shifted."""
        return x * self.weight + self.bias


def convolve_norms(model: nn.Module, float_graph: GraphModule) -> None:
    """Replaces each batch-norm that the float graph has as a convolution, or a product and a sum, by the same."""
    modules = dict(model.named_modules())
    for node in float_graph.graph.nodes:
        path = owner(node) if node.op == "call_function" else ""
        if not isinstance(modules.get(path), nn.modules.batchnorm._BatchNorm):
            continue
        if node.target in _CONVOLUTIONS:
            weight, bias = (_stored(float_graph, argument) for argument in node.args[1:3])
            made = _CONVOLUTIONS[node.target](len(bias), len(bias), 1, groups=len(bias))
            made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
            model.set_submodule(path, made)
        elif node.target is aten.mul.Tensor:
            (total,) = node.users
            model.set_submodule(path, Affine(_stored(float_graph, node.args[1]), _stored(float_graph, total.args[1])))


def _stored(graph: GraphModule, argument: Any) -> Tensor:
    value = parameter(graph, argument)
    assert value is not None
    return value.clone()
