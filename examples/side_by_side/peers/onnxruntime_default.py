"""onnxruntime.quantization as it comes: ``quantize_static`` with no option given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from measured import BATCH, Images, report


class Reader:
    """Hands the images over in batches, as ``quantize_static`` asks for them."""

    def __init__(self, name: str, images: Images) -> None:
        self.batches = iter([{name: images[i : i + BATCH]} for i in range(0, len(images), BATCH)])

    def get_next(self) -> Any:
        """The next batch; None after the last."""
        return next(self.batches, None)


def run(source: Path, images: Images, out: Path, **options: Any) -> str:
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


if __name__ == "__main__":
    report(run)
