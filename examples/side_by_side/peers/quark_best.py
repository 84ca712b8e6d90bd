"""AMD Quark with percentile ranges and weights per channel: its most accurate setting without AdaRound."""

from __future__ import annotations

from pathlib import Path

from measured import Images
from peers import quark

NEEDS = quark.NEEDS


def quantize(source: Path, images: Images, out: Path) -> str:
    """The library's own kinds of tensor, ``UInt8Spec`` and ``Int8Spec``; returns its version."""
    from quark.onnx.quantization.config.config import QConfig
    from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig, QuantGranularity, UInt8Spec

    weights = Int8Spec(quant_granularity=QuantGranularity.Channel)
    config = QConfig(global_config=QLayerConfig(activation=UInt8Spec(), weight=weights))
    return quark.by_config(config, source, images, out)
