"""qtool with its defaults: capture, calibration, conversion and export with every gate, from the PyTorch model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import BATCH, Images

NEEDS = "qtool"


def quantize(source: Path, images: Images, out: Path, **options: Any) -> str:
    """Starts from the spec and the weights that ``run.py`` writes beside the FP32 file; returns the version."""
    import shutil
    import tempfile

    from qtool.system import allocator

    allocator.tune()
    import torch

    import qtool
    from qtool.models.specs import load_model
    from qtool.version import __version__

    spec, classes = source.with_suffix(".txt").read_text().split("\n")
    model = load_model(spec, num_classes=int(classes), weights=source.with_suffix(".safetensors")).eval()
    batches = list(torch.from_numpy(images).split(BATCH))
    quantized = qtool.quantize(model, batches, **options)
    with tempfile.TemporaryDirectory() as folder:
        exported = qtool.export(quantized, folder, samples=batches)
        shutil.copy(exported.files["int8"], out)
    return str(__version__)
