"""ONNX Runtime on a CPU.

uint8 activations with int8 weights are the fast path (VPDPBUSD multiplies unsigned by signed bytes); an activation is
absorbed when the output's integer range already clips like it, so relu, relu6 and hardtanh cost nothing; a matrix
product may return float directly, so a linear layer that nothing reads in integers has no output quantizer; poolings,
paddings, repetitions and reshapes move bytes. A sigmoid is a table of 256, a product one kernel: hard-swish and SiLU
are written so. Softmax and layer-norm stay in float, and with them attention's products of two activations. Lookups
read bytes. Where weights alone are integers, a linear layer rounds its inputs to 8 bits in blocks of 32 as they come
(MatMulNBits), several times as fast as float where a few rows are multiplied; a convolution dequantizes them.

A SiLU is then two kernels where float has one. What stands around it makes up for that, except where EfficientNet
begins: its first convolution gathers patches of 3 bytes, the depthwise one behind it has few channels to fill a vector
with, and neither is faster in integers. They are left in float up to the next layer, and round nothing. B0 takes 4 %
less time for it on one image and as much more on sixteen, where the floats leave the cache (AVX512-VNNI, one thread).

An average pool is a convolution with ones where all its windows are of as many numbers. Its own integer kernel, for
those that leave padding out or are cut off at the end, takes 10 ns for each result, a hundred times as long as in float
(3×3, AVX512-VNNI, one thread), and so these run in float. Over three axes that kernel takes half of float's time.

Over three axes its integer kernel gathers what it multiplies tap by tap, a row of channels each time, which takes about
as long for one channel as for sixteen and does not pay with few: with 32 outputs, INT8 takes 8.7 times as long as FP32
for one input channel, 2.0 for 4, 1.1 for 8, 0.85 for 12 and 0.5 for 32, much the same with 1×1×1 to 5×5×5 taps and at a
stride; with 8 outputs 1.9 for 12 and 0.9 for 32; in groups 1.6 for 16 and 0.9 for 32 (AVX2, one thread). Depthwise
ones are as quick or quicker.
"""

from __future__ import annotations

import torch

from qtool.form import BLOCK
from qtool.graphs.operators import AVERAGE_POOLS, CONVOLUTIONS, aten, groups_of
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    BLENDS,
    FLOAT_BETWEEN,
    GATE_RANGE,
    POOLS_AND_JOINS,
    RELU_LIKE,
    SMOOTH,
    UPSAMPLES,
    Pattern,
    Target,
    averaging,
    weighted,
)
from qtool.quantization.targets.stored import STORED

MOST_CHANNELS = 32
"""Of a depthwise convolution that is slower in integers."""

FEWEST_CHANNELS, FEWEST_IN_GROUPS, FEWEST_OUTPUTS = 12, 32, 16
"""That a convolution over three axes reads and gives to be faster in integers; with fewer outputs, as many more."""


def slower_in_integers(conv: torch.fx.Node) -> str:
    """Why a convolution stays in float; empty where it does not."""
    return begins_in_float(conv) or has_few_channels(conv)


def has_few_channels(conv: torch.fx.Node) -> str:
    """Why a convolution over three axes stays in float; empty where it does not."""
    weight = conv.args[1]
    if conv.target is not aten.conv3d.default or not isinstance(weight, torch.fx.Node):
        return ""
    outputs, channels = weight.meta["val"].shape[:2]
    groups = groups_of(conv)
    if groups > 1 and channels == 1:
        return ""
    fewest = FEWEST_CHANNELS if groups == 1 else FEWEST_IN_GROUPS
    few = channels * min(outputs // groups, FEWEST_OUTPUTS) < fewest * FEWEST_OUTPUTS
    return "a convolution over three axes of so few channels is slower in integers" if few else ""


def has_uneven_windows(pool: torch.fx.Node) -> str:
    """Why an average pool is as good in integers as in float; empty where it is not."""
    padded, ceil, counted = averaging(pool)
    uneven = ceil or (padded and not counted)
    return "" if uneven and pool.target is not aten.avg_pool3d.default else "its integer kernel is as quick"


def begins_in_float(conv: torch.fx.Node) -> str:
    """Why a convolution stays in float with the network's first SiLUs; empty where it does not."""
    first = next(node for node in conv.graph.nodes if node.target in CONVOLUTIONS)
    second = next(iter(_behind_silu(first)), None)
    if conv not in (first, second) or second is None or not _is_small_depthwise(second) or not _behind_silu(second):
        return ""
    return "a SiLU between the image and few channels: float has one kernel for it, integers two"


def _behind_silu(conv: torch.fx.Node) -> list[torch.fx.Node]:
    """What reads the SiLU, or the product that it is written as, of a convolution's result, batch-norm included."""
    value = conv
    if [user.target for user in conv.users] == [aten.batch_norm.default]:
        value = next(iter(conv.users))
    users = {user.target: user for user in value.users}
    if users.keys() == {aten.silu.default}:
        return list(users[aten.silu.default].users)
    if users.keys() == {aten.sigmoid.default, aten.mul.Tensor} and len(value.users) == 2:
        gate, product = users[aten.sigmoid.default], users[aten.mul.Tensor]
        return list(product.users) if list(gate.users) == [product] else []
    return []


def _is_small_depthwise(node: torch.fx.Node) -> bool:
    if node.target is not aten.conv2d.default:
        return False
    channels = node.meta["val"].shape[1]
    return bool(groups_of(node) == channels <= MOST_CHANNELS)


ORT_CPU = Target(
    "ort-cpu",
    (
        *weighted(RELU_LIKE, accepts=slower_in_integers),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("mul", (aten.mul.Tensor,), **BINARY, **BETWEEN),
        Pattern("avg_pool", AVERAGE_POOLS, accepts=has_uneven_windows, **FLOAT_BETWEEN),
        *POOLS_AND_JOINS,
        Pattern("upsample", UPSAMPLES, shares=True, **BETWEEN),
        Pattern("sigmoid", (aten.sigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("hard_sigmoid", (aten.hardsigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("leaky_relu", (aten.leaky_relu.default,), **BETWEEN),
        *STORED,
        Pattern("activation", (*RELU_LIKE, *SMOOTH, aten.prelu.default), **FLOAT_BETWEEN),
        Pattern("upsample", BLENDS, **FLOAT_BETWEEN),
    ),
    products=(aten.silu.default, aten.hardswish.default),
    adds_pairs=True,
    channels_last=True,
    block=BLOCK,
    block_shared=False,
    integer_lstm=True,
)
