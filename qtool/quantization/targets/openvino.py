"""OpenVINO's CPU plugin, which reads the same QDQ files.

Its low-precision transformations turn each pair into scales on the operator, and oneDNN's convolutions and matrix
products take any activation behind them as a post-operation: an output is quantized after hard-swish, SiLU or GELU as
after relu, and never before. So it is with a residual sum, which a convolution adds before it rounds: only the sum's
other operand has a pair. Activations are affine uint8, weights symmetric int8.

Three kernels want no zero points, so that what they read is symmetric int8, or uint8 that starts at 0: attention's
products, which run with their softmax as one kernel; a concatenation of parts that each keep their scale where
only a batch-norm's product and sum read it, as in a DenseNet; and averages that count a padding, which is with the
integer 0 there, whatever number that stands for (-11 dB). The first two become one kernel from integers to integers
then, and nothing that was concatenated is rounded anew. With zero points they run in float: 0.79 and 0.81 times the
speed of what OpenVINO's own quantizer (NNCF) makes of a ViT-S/16 and a DenseNet-121, instead of 1.06 and 1.03
(AVX512-VNNI, one thread).

Convolutions about which its kernel errs on CPUs with AMX stay in float (see :mod:`qtool.runtimes.onednn`), but for
groups of channels that are filled up to as many as it multiplies rightly.

Lookups read bytes. Where weights alone are integers, of 8 or 4 bits, its linear layers multiply them as they are stored
and round what they read in groups as it comes, much as ONNX Runtime does, but for layers of a single output.
"""

from __future__ import annotations

import dataclasses

import torch

from qtool.form import BLOCK
from qtool.graphs.operators import AVERAGE_POOLS, aten, by_axis
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    FLOAT_BETWEEN,
    POINTWISE,
    POOLS_AND_MOVES,
    SOFTMAX,
    Pattern,
    Target,
    averaging,
    makes_no_logarithm,
    weighted,
)
from qtool.quantization.targets.stored import PRODUCTS, STORED
from qtool.runtimes import onednn

_LOGITS = (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.where.ScalarOther, aten.masked_fill.Scalar)


def of_products(softmax: torch.fx.Node) -> str:
    """Why a softmax is none of attention's; empty where it is one. Elsewhere its result is not worth rounding."""
    waiting = softmax.all_input_nodes
    while any(node.target in _LOGITS for node in waiting):
        waiting = [n for node in waiting for n in (node.all_input_nodes if node.target in _LOGITS else [node])]
    product = any(node.target in PRODUCTS for node in waiting)
    return "" if product else "it runs in float"


def counts_padding(pool: torch.fx.Node) -> str:
    """Why an average counts no zeros from behind the edges; empty where it does."""
    padded, _, counted = averaging(pool)
    return "" if padded and counted else "it counts no padding"


def comes_out_right(layer: torch.fx.Node) -> str:
    """Why a layer with a weight is not for integers; empty where it is."""
    conv = _geometry(layer)
    return "its integer kernel errs on CPUs with AMX" if conv is not None and onednn.errs(conv) else ""


def group_width(layer: torch.fx.Node) -> int:
    """How many channels the groups of a convolution have to have to come out right; 0 where no more would help.

    With over twice as many it would be no faster than in float.
    """
    conv = _geometry(layer)
    if conv is None or conv.groups == 1 or 2 * conv.weight[1] < onednn.FEW or not onednn.errs(conv):
        return 0
    outputs, _, *taps = conv.weight
    return 0 if onednn.errs(dataclasses.replace(conv, weight=(outputs, onednn.FEW, *taps))) else onednn.FEW


def _geometry(layer: torch.fx.Node) -> onednn.Geometry | None:
    """What is known of a convolution; None of a linear layer. Over a single column its file has no stride."""
    weight = layer.args[1]
    shape = weight.meta["val"].shape if isinstance(weight, torch.fx.Node) else ()
    if len(shape) < 3:
        return None
    strides, dilations, groups = (layer.args[place] if len(layer.args) > place else 1 for place in (3, 5, 6))
    axes, result = len(shape) - 2, layer.meta["val"].shape[2:]
    known = [size if isinstance(size, int) else None for size in result]
    steps = by_axis(strides, axes)
    if known[-1] == 1:
        steps[-1] = 1
    return onednn.Geometry(shape, steps, by_axis(dilations, axes), int(str(groups)), known)


OPENVINO = Target(
    "openvino",
    (
        *weighted(POINTWISE, sums=True, accepts=comes_out_right, float_output=True),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("mul", (aten.mul.Tensor,), **BINARY, **BETWEEN),
        Pattern("concat", (aten.cat.default,), joins=True, **BETWEEN),
        Pattern("avg_pool", AVERAGE_POOLS, signed=True, accepts=counts_padding, **BETWEEN),
        *POOLS_AND_MOVES,
        *STORED,
        Pattern(
            "matmul",
            PRODUCTS,
            operands=(0, 1),
            float_output=True,
            signed=True,
            accepts=makes_no_logarithm,
        ),
        Pattern(
            "softmax",
            SOFTMAX,
            operands=(),
            float_output=True,
            in_float="it runs in float between integers",
            accepts=of_products,
        ),
        Pattern("activation", POINTWISE, **FLOAT_BETWEEN),
    ),
    flat_linears=False,
    attention=True,
    bare_moves=True,
    scales_in_float=True,
    adds_pairs=True,
    group_width=group_width,
    block=BLOCK,
    block_outputs=2,
)
