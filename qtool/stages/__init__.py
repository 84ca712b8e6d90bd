"""The four stages, over plain objects and over run directories.

Given objects (an ``nn.Module``, a :class:`~qtool.data.specs.Data`, an iterable of batches) a stage returns
objects; given ``out`` it also commits what it made to a run directory; given a run directory where a
model is asked for, it opens what an earlier stage recorded there. The command line and ``import qtool``
call the same functions, and keyword arguments are the fields of the stage's dataclass in
:mod:`qtool.recipe`.

``progress`` is True for bars and lines on standard error, or a function that takes lines: of a training one an epoch.

Left out on purpose: any knowledge of a technique. Stages never import each other, so what one needs of
another (fine-tuning inside QAT, calibration samples for the parity gate) is handed over here.
"""

from qtool.stages.benchmarking import benchmark
from qtool.stages.exporting import export
from qtool.stages.quantization import load_quantized, quantize
from qtool.stages.sensitivity import sensitivity
from qtool.stages.training import train

__all__ = ["benchmark", "export", "load_quantized", "quantize", "sensitivity", "train"]
