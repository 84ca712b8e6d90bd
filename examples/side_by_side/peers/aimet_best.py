"""AIMET with ranges by signal-to-noise (``tf_enhanced``): its most accurate setting without AdaRound."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import aimet

NEEDS = aimet.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """As ``aimet`` with the other ranges; returns the version."""
    return aimet.quantize(source, images, out, quant_scheme="tf_enhanced")
