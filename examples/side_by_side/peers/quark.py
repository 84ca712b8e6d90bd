"""AMD Quark with ``INT8_CNN_DEFAULT_CONFIG``: uint8 activations, int8 weights per tensor, min-max ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import Images, Reader

NEEDS = "amd-quark==0.13 onnxruntime==1.31.1 torch==2.13.0"


def quantize(source: Path, images: Images, out: Path) -> str:
    """The configuration that the library offers for convolutional networks; returns its version."""
    from quark.onnx.quantization.config.config import Config
    from quark.onnx.quantization.config.custom_config import INT8_CNN_DEFAULT_CONFIG

    return by_config(Config(global_quant_config=INT8_CNN_DEFAULT_CONFIG), source, images, out)


def by_config(config: Any, source: Path, images: Images, out: Path) -> str:
    """Quantizes as ``config`` says; returns the version."""
    import onnx
    import quark
    from quark.onnx import ModelQuantizer

    name = onnx.load(str(source), load_external_data=False).graph.input[0].name
    ModelQuantizer(config).quantize_model(str(source), str(out), Reader(name, images))
    return str(quark.__version__)
