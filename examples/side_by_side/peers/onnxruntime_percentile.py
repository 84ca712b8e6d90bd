"""onnxruntime.quantization as ``onnxruntime_best``, with its percentile ranges: its most accurate setting."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import onnxruntime_best

NEEDS = onnxruntime_best.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """99.999 % of each tensor's values; the library keeps all of them in memory until it has seen the last."""
    from onnxruntime.quantization import CalibrationMethod

    return onnxruntime_best.quantize(source, images, out, calibrate_method=CalibrationMethod.Percentile)
