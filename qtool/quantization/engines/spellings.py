"""How the operators of a captured graph are written in models: as modules, functions and tensor methods.

One captured operator has many spellings, and an FX trace keeps them apart. This table is what relates
a target's patterns (``targets/``), which speak of captured operators, to a traced model. A spelling that is
missing here costs that operator its place in an integer unit when the engine is ``torch.ao``, which says so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional as F

from qtool.graphs.operators import aten

WRITTEN: dict[Any, tuple[Any, ...]] = {
    aten.relu.default: (nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
    aten.relu6.default: (nn.ReLU6, F.relu6),
    aten.hardtanh.default: (nn.Hardtanh, nn.ReLU6, F.hardtanh, F.hardtanh_, F.relu6),
    aten.clamp.default: (torch.clamp, torch.clip, "clamp", "clamp_", "clip"),
    aten.clamp_min.default: (torch.clamp_min, torch.clamp, "clamp_min", "clamp"),
    aten.add.Tensor: (operator.add, operator.iadd, torch.add, "add", "add_"),
    aten.mul.Tensor: (operator.mul, operator.imul, torch.mul, "mul", "mul_"),
    aten.cat.default: (torch.cat, torch.concat, torch.concatenate),
    aten.adaptive_avg_pool1d.default: (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d),
    aten.adaptive_avg_pool2d.default: (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
    aten.mean.dim: (torch.mean, "mean"),
    aten.avg_pool1d.default: (nn.AvgPool1d, F.avg_pool1d),
    aten.avg_pool2d.default: (nn.AvgPool2d, F.avg_pool2d),
    aten.avg_pool3d.default: (nn.AvgPool3d, F.avg_pool3d),
    aten.max_pool1d.default: (nn.MaxPool1d, F.max_pool1d, torch.max_pool1d),
    aten.max_pool2d.default: (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d),
    aten.max_pool3d.default: (nn.MaxPool3d, F.max_pool3d, torch.max_pool3d),
    aten.flatten.using_ints: (nn.Flatten, torch.flatten, "flatten"),
    aten.reshape.default: (
        torch.reshape,
        "reshape",
        "view",
        nn.Unflatten,
        torch.unflatten,
        "unflatten",
        "view_as",
        "reshape_as",
    ),
    aten.permute.default: (torch.permute, "permute", torch.movedim, torch.moveaxis, "movedim", "moveaxis"),
    aten.transpose.int: (torch.transpose, "transpose", torch.swapaxes, torch.swapdims, "swapaxes", "swapdims"),
    aten.squeeze.dim: (torch.squeeze, "squeeze"),
    aten.unsqueeze.default: (torch.unsqueeze, "unsqueeze"),
    aten.contiguous.default: ("contiguous",),
    aten.clone.default: (torch.clone, "clone"),
    aten.expand.default: ("expand", "expand_as"),
    aten.slice.Tensor: (operator.getitem,),
    aten.select.int: (torch.select, "select"),
    aten.pixel_shuffle.default: (nn.PixelShuffle, F.pixel_shuffle),
    aten.pixel_unshuffle.default: (nn.PixelUnshuffle, F.pixel_unshuffle),
    aten.channel_shuffle.default: (nn.ChannelShuffle, F.channel_shuffle),
    aten.dropout.default: (nn.Dropout, F.dropout),
    aten.feature_dropout.default: (nn.Dropout2d, F.dropout2d),
    aten.sigmoid.default: (nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid"),
    aten.leaky_relu.default: (nn.LeakyReLU, F.leaky_relu),
    aten.prelu.default: (nn.PReLU, torch.prelu, F.prelu, "prelu"),
    aten.upsample_bilinear2d.vec: (nn.Upsample, nn.UpsamplingBilinear2d, F.interpolate),
    aten.hardswish.default: (nn.Hardswish, F.hardswish),
    aten.hardsigmoid.default: (nn.Hardsigmoid, F.hardsigmoid),
    aten.silu.default: (nn.SiLU, F.silu),
    aten.gelu.default: (nn.GELU, F.gelu),
    aten.elu.default: (nn.ELU, F.elu, F.elu_),
    aten.tanh.default: (nn.Tanh, torch.tanh, F.tanh, "tanh", "tanh_"),
    aten.mish.default: (nn.Mish, F.mish),
    aten.clamp_max.default: (torch.clamp_max, "clamp_max", "clamp_max_"),
    aten.conv1d.default: (nn.Conv1d, F.conv1d),
    aten.conv2d.default: (nn.Conv2d, F.conv2d),
    aten.conv3d.default: (nn.Conv3d, F.conv3d),
    aten.linear.default: (nn.Linear, F.linear),
}

# What the capture writes as another operator where that means the same: clamp(min=0) is a ReLU, for instance.
RESPELT: dict[Any, tuple[Any, ...]] = {
    aten.relu.default: (*WRITTEN[aten.clamp.default], *WRITTEN[aten.clamp_min.default]),
    aten.leaky_relu.default: (nn.RReLU, F.rrelu, F.rrelu_),
    aten.mean.dim: (*WRITTEN[aten.adaptive_avg_pool1d.default], nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d),
}

_PARTS = (torch.chunk, torch.split, torch.tensor_split, torch.unbind, "chunk", "split", "tensor_split", "unbind")


def refuse_parts(graph: Graph) -> None:
    """Raises TypeError for an operator that gives several tensors: graph mode would observe them as one."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and node.target in _PARTS:
            raise TypeError(f"'{getattr(node.target, '__name__', node.target)}' gives several tensors")
