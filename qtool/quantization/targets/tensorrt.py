"""TensorRT, by explicit quantization: it runs an operator in INT8 where the file has Q/DQ pairs around it.

Activations and weights are symmetric int8 with zero point 0, weights per output channel; biases stay float32. A
convolution or matrix product takes batch-norm and any pointwise activation behind it into one kernel, so a pair
stands behind the activation and none between. Sums of a residual branch, poolings and concatenations run in int8
between pairs; a sigmoid, softmax or layer-norm of its own gains nothing and stays in float.
"""

from __future__ import annotations

from qtool.graphs.operators import aten
from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    INT8_ACTIVATION,
    POINTWISE,
    POOLS_AND_JOINS,
    Pattern,
    Target,
    weighted,
)

TENSORRT = Target(
    "tensorrt",
    (
        *weighted(POINTWISE),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        *POOLS_AND_JOINS,
    ),
    activation=INT8_ACTIVATION,
    integer_bias=False,
)
