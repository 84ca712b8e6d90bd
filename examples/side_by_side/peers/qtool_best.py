"""qtool at its most accurate without labels or training: ranges by the error at the output, and GPTQ's rounding."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import qtool

NEEDS = qtool.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """As ``qtool``, with ``ranges="output"`` and ``algorithms=("gptq",)``; returns the version."""
    return qtool.quantize(source, images, out, ranges="output", algorithms=("gptq",))
