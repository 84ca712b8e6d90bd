"""AIMET (aimet-onnx) with its defaults: uint8 activations, int8 weights per channel, min-max ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import Images, Reader

NEEDS = "aimet-onnx==2.42.0 torch==2.13.0"


def quantize(source: Path, images: Images, out: Path, **options: Any) -> str:
    """Simulates, computes encodings over batches and writes Q/DQ with int8 weights; returns the version."""
    import aimet_onnx
    import onnx

    model = onnx.load(str(source))
    batches = Reader(model.graph.input[0].name, images).all
    sim = aimet_onnx.QuantizationSimModel(model, **options)
    sim.compute_encodings(batches)
    onnx.save(sim.to_onnx_qdq(prequantize_constants=True), str(out))
    return str(aimet_onnx.__version__)
