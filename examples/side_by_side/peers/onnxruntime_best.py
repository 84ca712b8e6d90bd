"""onnxruntime.quantization told what its CPU kernels are fastest with: uint8 activations, int8 weights per channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import Images
from peers import onnxruntime_default

NEEDS = onnxruntime_default.NEEDS


def quantize(source: Path, images: Images, out: Path, **options: Any) -> str:
    """U8S8 QDQ, one scale per output channel, min-max ranges."""
    from onnxruntime.quantization import QuantType

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    return onnxruntime_default.quantize(source, images, out, **types, per_channel=True, **options)
