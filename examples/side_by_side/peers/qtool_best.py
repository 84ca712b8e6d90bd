"""qtool with ``--effort best``: its most accurate setting without labels or training."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import qtool

NEEDS = qtool.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """As ``qtool``, with ``effort="best"``; returns the version."""
    return qtool.quantize(source, images, out, effort="best")
