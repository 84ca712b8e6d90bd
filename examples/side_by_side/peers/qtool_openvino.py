"""qtool with ``--target openvino``: pairs stand where OpenVINO's CPU plugin fuses them."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import qtool

NEEDS = "qtool[openvino]"


def quantize(source: Path, images: Images, out: Path) -> str:
    """As ``qtool``, with ``target="openvino"``; returns the version."""
    return qtool.quantize(source, images, out, target="openvino")
