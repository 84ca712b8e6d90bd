"""NNCF with its defaults, on the ONNX file, or on OpenVINO's own form of it where OUT ends in .xml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import Images

NEEDS = "nncf==3.4.0 onnx onnxruntime openvino"


def quantize(source: Path, images: Images, out: Path, **options: Any) -> str:
    """``nncf.quantize`` over single images; returns its version."""
    import nncf

    model: Any
    if out.suffix == ".xml":
        import openvino

        model = openvino.Core().read_model(str(source))
        name = model.inputs[0].get_any_name()
    else:
        import onnx

        model = onnx.load(str(source))
        name = model.graph.input[0].name
    data = nncf.Dataset([image[None] for image in images], lambda image: {name: image})
    quantized = nncf.quantize(model, data, subset_size=len(images), **options)
    openvino.save_model(quantized, str(out)) if out.suffix == ".xml" else onnx.save(quantized, str(out))
    return str(nncf.__version__)
