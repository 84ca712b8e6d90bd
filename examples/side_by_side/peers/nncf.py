# ruff: noqa: E402
"""NNCF on the ONNX file, or on OpenVINO's own form of it where OUT ends in .xml; both with their defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE.resolve())]

from measured import Images, report


def run(source: Path, images: Images, out: Path) -> str:
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
    quantized = nncf.quantize(model, data, subset_size=len(images))
    openvino.save_model(quantized, str(out)) if out.suffix == ".xml" else onnx.save(quantized, str(out))
    return str(nncf.__version__)


if __name__ == "__main__":
    report(run)
