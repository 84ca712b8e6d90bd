# ruff: noqa: E402
"""qtool itself: capture, calibration, conversion and export with every gate, from the PyTorch model.

It starts from the spec and the weights that ``run.py`` writes beside the FP32 file; the others start from that file.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE.resolve())]

from measured import BATCH, Images, report


def run(source: Path, images: Images, out: Path) -> str:
    """Min-max ranges, as the others' defaults have them; returns the version."""
    import shutil
    import tempfile

    from qtool import allocator

    allocator.tune()
    import torch

    import qtool
    from qtool.models import load_model
    from qtool.version import __version__

    weights = source.with_suffix(".safetensors")
    model = load_model(source.with_suffix(".txt").read_text(), num_classes=1000, weights=weights).eval()
    batches = list(torch.from_numpy(images).split(BATCH))
    quantized = qtool.quantize(model, batches)
    with tempfile.TemporaryDirectory() as folder:
        exported = qtool.export(quantized, folder, samples=batches)
        shutil.copy(exported.files["int8"], out)
    return str(__version__)


if __name__ == "__main__":
    report(run)
