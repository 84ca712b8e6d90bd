"""NNCF at its most accurate: asymmetric activations (the mixed preset) and full bias correction."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import nncf

NEEDS = nncf.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """As ``nncf``, each layer corrected after those before it; returns its version."""
    from nncf import QuantizationPreset

    return nncf.quantize(source, images, out, preset=QuantizationPreset.MIXED, fast_bias_correction=False)
