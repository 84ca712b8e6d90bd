"""NVIDIA ModelOpt as ``modelopt``, with its other ranges, ``max``."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import modelopt

NEEDS = modelopt.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """``calibration_method="max"``; returns the version."""
    return modelopt.quantize(source, images, out, method="max")
