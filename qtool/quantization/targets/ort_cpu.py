"""ONNX Runtime on a CPU.

uint8 activations with int8 weights are the fast path (VPDPBUSD multiplies unsigned by signed bytes); an activation is
absorbed when the output's integer range already clips like it, so relu, relu6 and hardtanh cost nothing; a matrix
product may return float directly, so the last linear layer needs no output quantizer; poolings, paddings,
repetitions and reshapes move bytes. A sigmoid is a table of 256, a product one kernel: hard-swish and SiLU are written
so. Softmax and layer-norm stay in float, and with them attention's products of two activations. Lookups read bytes.
"""

from __future__ import annotations

from qtool.quantization.targets.base import (
    BETWEEN,
    BINARY,
    GATE_RANGE,
    PADS,
    POOLS_AND_JOINS,
    RELU_LIKE,
    SMOOTH,
    TABLE,
    UPSAMPLES,
    Pattern,
    Target,
    aten,
    pad_in_integers,
    weighted,
)

ORT_CPU = Target(
    "ort-cpu",
    (
        *weighted(RELU_LIKE),
        Pattern("add", (aten.add.Tensor,), **BINARY, **BETWEEN),
        Pattern("mul", (aten.mul.Tensor,), **BINARY, **BETWEEN),
        *POOLS_AND_JOINS,
        Pattern("pad", PADS, shares=True, accepts=pad_in_integers, **BETWEEN),
        Pattern("upsample", UPSAMPLES, shares=True, **BETWEEN),
        Pattern("sigmoid", (aten.sigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("hard_sigmoid", (aten.hardsigmoid.default,), fixed=GATE_RANGE, **BETWEEN),
        Pattern("leaky_relu", (aten.leaky_relu.default,), **BETWEEN),
        TABLE,
        Pattern("activation", (*RELU_LIKE, *SMOOTH), in_float="it runs in float between integers", **BETWEEN),
    ),
    products=(aten.silu.default, aten.hardswish.default),
)
