"""NNCF with asymmetric activations (the mixed preset) and full bias correction, each layer after those before it."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import nncf

NEEDS = nncf.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """Returns the version.

    On an ONNX file with a residual block whose shortcut is a convolution NNCF 3.4 ends so with ``Failed to find node
    output or a constant initializer producing output``, whoever wrote the file; on OpenVINO's form it does not.
    """
    from nncf import QuantizationPreset

    return nncf.quantize(source, images, out, preset=QuantizationPreset.MIXED, fast_bias_correction=False)
