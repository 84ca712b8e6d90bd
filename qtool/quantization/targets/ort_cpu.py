"""ONNX Runtime on a CPU.

uint8 activations with int8 weights are the fast path (VPDPBUSD multiplies unsigned by signed bytes); an activation is
absorbed when the output's integer range already clips like it, so relu, relu6 and hardtanh cost nothing; a matrix
product may return float directly, so the last linear layer needs no output quantizer; poolings, paddings,
repetitions and reshapes move bytes. A sigmoid is a table of 256, a product one kernel: hard-swish and SiLU are written
so. Softmax and layer-norm stay in float, and with them attention's products of two activations. Lookups read bytes.
"""

from __future__ import annotations

from qtool.quantization.capture import CONVOLUTIONS
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    GATE_RANGE,
    GLOBAL_POOLS,
    MOVES,
    RELU_LIKE,
    SMOOTH,
    TABLE,
    UPSAMPLES,
    Pattern,
    Target,
    aten,
    global_mean,
    pad_in_integers,
    pool_to_one,
)

ORT_CPU = Target(
    "ort-cpu",
    (
        Pattern("conv", CONVOLUTIONS[:2], batch_norm=True, activations=RELU_LIKE, weighted=True),
        Pattern(
            "linear", (aten.linear.default,), batch_norm=True, activations=RELU_LIKE, weighted=True, float_output=True
        ),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("mul", (aten.mul.Tensor,), **BINARY, **BETWEEN),
        Pattern("concat", (aten.cat.default,), **BETWEEN),
        Pattern("global_avg_pool", GLOBAL_POOLS, accepts=pool_to_one, **BETWEEN),
        Pattern("global_avg_pool", (aten.mean.dim,), accepts=global_mean, **BETWEEN),
        Pattern("avg_pool", (aten.avg_pool1d.default, aten.avg_pool2d.default), **BETWEEN),
        Pattern("max_pool", (aten.max_pool1d.default, aten.max_pool2d.default), shares=True, **BETWEEN),
        Pattern("move", MOVES, shares=True, **BETWEEN),
        Pattern(
            "pad", (aten.constant_pad_nd.default, aten.pad.default), shares=True, accepts=pad_in_integers, **BETWEEN
        ),
        Pattern("upsample", UPSAMPLES, shares=True, **BETWEEN),
        Pattern("sigmoid", (aten.sigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("hard_sigmoid", (aten.hardsigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("leaky_relu", (aten.leaky_relu.default,), **BETWEEN),
        TABLE,
        Pattern("activation", (*RELU_LIKE, *SMOOTH), in_float="it runs in float between integers", **BETWEEN),
    ),
    products=(aten.silu.default, aten.hardswish.default),
)
