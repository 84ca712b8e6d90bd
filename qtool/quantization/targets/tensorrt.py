"""TensorRT, by explicit quantization: it runs an operator in INT8 where the file has Q/DQ pairs around it.

Activations and weights are symmetric int8 with zero point 0, weights per output channel; biases stay float32. A
convolution or matrix product takes batch-norm and any pointwise activation behind it into one kernel, so a pair
stands behind the activation and none between. Sums of a residual branch, poolings and concatenations run in int8
between pairs; a sigmoid, softmax or layer-norm of its own gains nothing and stays in float.
"""

from __future__ import annotations

from qtool.quantization.capture import CONVOLUTIONS
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    GLOBAL_POOLS,
    INT8_ACTIVATION,
    MOVES,
    RELU_LIKE,
    SMOOTH,
    Pattern,
    Target,
    aten,
    global_mean,
    pool_to_one,
)

_FUSED = (*RELU_LIKE, *SMOOTH, aten.sigmoid.default, aten.hardsigmoid.default, aten.leaky_relu.default)

TENSORRT = Target(
    "tensorrt",
    (
        Pattern("conv", CONVOLUTIONS[:2], batch_norm=True, activations=_FUSED, weighted=True),
        Pattern(
            "linear", (aten.linear.default,), batch_norm=True, activations=_FUSED, weighted=True, float_output=True
        ),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("concat", (aten.cat.default,), **BETWEEN),
        Pattern("global_avg_pool", GLOBAL_POOLS, accepts=pool_to_one, **BETWEEN),
        Pattern("global_avg_pool", (aten.mean.dim,), accepts=global_mean, **BETWEEN),
        Pattern("avg_pool", (aten.avg_pool1d.default, aten.avg_pool2d.default), **BETWEEN),
        Pattern("max_pool", (aten.max_pool1d.default, aten.max_pool2d.default), shares=True, **BETWEEN),
        Pattern("move", MOVES, shares=True, **BETWEEN),
    ),
    activation=INT8_ACTIVATION,
    integer_bias=False,
)
