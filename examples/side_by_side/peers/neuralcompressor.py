"""Intel Neural Compressor (its ONNX part): Q/DQ, uint8 activations, int8 weights per channel, min-max ranges."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path

from measured import Images, Reader

NEEDS = "onnx-neural-compressor==1.0 prettytable scipy"  # it imports two packages that it does not ask for


def quantize(source: Path, images: Images, out: Path) -> str:
    """``StaticQuantConfig`` over all the images; the library writes weights to a second file, gathered here."""
    import onnx
    from onnx_neural_compressor.quantization import QuantFormat, quantize
    from onnx_neural_compressor.quantization.config import StaticQuantConfig

    name = onnx.load(str(source), load_external_data=False).graph.input[0].name
    config = StaticQuantConfig(
        Reader(name, images), quant_format=QuantFormat.QDQ, per_channel=True, calibration_sampling_size=len(images),
        execution_provider="CPUExecutionProvider",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        quantize(str(source), f"{folder}/int8.onnx", config)
        onnx.save(onnx.load(f"{folder}/int8.onnx"), str(out))
    return importlib.metadata.version("onnx-neural-compressor")
