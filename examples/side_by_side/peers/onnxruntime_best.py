"""onnxruntime.quantization told what its CPU kernels are fastest with: uint8 activations, int8 weights per channel."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from measured import Images, report
from onnxruntime_default import run


def best(source: Path, images: Images, out: Path) -> str:
    """U8S8 QDQ, one scale per output channel."""
    from onnxruntime.quantization import QuantType

    return run(source, images, out, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, per_channel=True)


if __name__ == "__main__":
    report(best)
