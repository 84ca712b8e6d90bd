"""OpenVINO's CPU plugin, which reads the same QDQ files.

Its low-precision transformations turn each pair into scales on the operator, and oneDNN's convolutions and matrix
products take any activation behind them as a post-operation: an output is quantized after hard-swish, SiLU or GELU as
after relu, and never before. Activations are affine uint8, weights symmetric int8.
"""

from __future__ import annotations

from qtool.quantization.capture import CONVOLUTIONS
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    GLOBAL_POOLS,
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

OPENVINO = Target(
    "openvino",
    (
        Pattern("conv", CONVOLUTIONS[:2], batch_norm=True, activations=_FUSED, weighted=True),
        Pattern(
            "linear", (aten.linear.default,), batch_norm=True, activations=_FUSED, weighted=True, float_output=True
        ),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("mul", (aten.mul.Tensor,), **BINARY, **BETWEEN),
        Pattern("concat", (aten.cat.default,), **BETWEEN),
        Pattern("global_avg_pool", GLOBAL_POOLS, accepts=pool_to_one, **BETWEEN),
        Pattern("global_avg_pool", (aten.mean.dim,), accepts=global_mean, **BETWEEN),
        Pattern("avg_pool", (aten.avg_pool1d.default, aten.avg_pool2d.default), **BETWEEN),
        Pattern("max_pool", (aten.max_pool1d.default, aten.max_pool2d.default), shares=True, **BETWEEN),
        Pattern("move", MOVES, shares=True, **BETWEEN),
        Pattern("activation", _FUSED, in_float="it runs in float between integers", **BETWEEN),
    ),
)
