"""What each target runtime fuses: one file per runtime, and the table of all of them.

``auto`` is the best runtime at hand: TensorRT where it is installed beside a CUDA device, otherwise ONNX Runtime on the
CPU. ``ort-cuda`` is a name so that it can be refused: that provider has no integer convolution.
"""

from __future__ import annotations

import importlib.util

import torch

from qtool.errors import UsageError, nearest
from qtool.quantization.targets.base import (
    IN_BLOCKS,
    INT8_ACTIVATION,
    INT8_WEIGHT,
    MOVES,
    RELU_LIKE,
    SOFTMAX,
    UINT8,
    Format,
    Pattern,
    Target,
)
from qtool.quantization.targets.openvino import OPENVINO
from qtool.quantization.targets.ort_cpu import ORT_CPU
from qtool.quantization.targets.tensorrt import TENSORRT

__all__ = [
    "INT8_ACTIVATION", "INT8_WEIGHT", "IN_BLOCKS", "MOVES", "OPENVINO", "ORT_CPU", "RELU_LIKE", "SOFTMAX",
    "TARGETS", "TENSORRT", "UINT8", "Format", "Pattern", "Target", "get_target",
]  # fmt: skip

TARGETS = {target.name: target for target in (ORT_CPU, TENSORRT, OPENVINO)}


def get_target(
    name: str, weight_bits: int = 8, edge_bits: int = 8, *, activation_bits: int = 8, weights_only: bool = False
) -> Target:
    """The target of that name, its weights in ``weight_bits``, those of the first and last layer in ``edge_bits``.

    With ``weights_only`` nothing else is quantized; fewer ``activation_bits`` than 8 are a simulation's.
    Raises UsageError for a target that is unknown or without INT8, for one whose 4-bit weights are not known, beside
    integer activations or at all, and for bits of activations that are not to be quantized.
    """
    if name == "ort-cuda":
        raise UsageError(
            "--target", "a runtime that convolves integers",
            "'ort-cuda', whose Q/DQ pairs run as kernels of their own around float ones",
            "serve the FP16 file there, or choose tensorrt",
        )  # fmt: skip
    name = _at_hand() if name == "auto" else name
    if name not in TARGETS:
        raise UsageError("--target", "a known runtime", repr(name), nearest(name, [*TARGETS, "auto"]))
    if weight_bits < 7 and name != ORT_CPU.name and not (weights_only and TARGETS[name].block):
        raise UsageError("--weight-bits", f"7 or 8 for target '{name}'", str(weight_bits), "choose ort-cpu")
    if weights_only and activation_bits < 8:
        raise UsageError("--activation-bits", "8 with --weights-only", str(activation_bits), "leave one of them out")
    target = TARGETS[name] if weight_bits == 8 else TARGETS[name].with_weights(weight_bits, edge_bits)
    if weights_only:
        return target.with_weights_only()
    return target if activation_bits == 8 else target.with_activations(activation_bits)


def _at_hand() -> str:
    installed = importlib.util.find_spec("tensorrt") is not None
    return "tensorrt" if installed and torch.cuda.is_available() else "ort-cpu"
