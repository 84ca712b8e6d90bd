"""onnxruntime.quantization as it comes: ``quantize_static`` with no option given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import Images, Reader

NEEDS = "onnxruntime==1.31.1 onnx sympy"


def quantize(source: Path, images: Images, out: Path, **options: Any) -> str:
    """Quantizes after the pre-processing that the library recommends; returns its version."""
    import onnx
    import onnxruntime
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(str(source), str(prepared))
    name = onnx.load(str(prepared), load_external_data=False).graph.input[0].name
    quantization.quantize_static(str(prepared), str(out), Reader(name, images), **options)
    prepared.unlink()
    return str(onnxruntime.__version__)
