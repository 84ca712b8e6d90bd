"""A model and a data set of your own: two functions without arguments, named on the command line as FILE:FUNCTION.

Run from the repository's root::

    qtool train --model examples/own_model.py:model --data examples/own_model.py:data --epochs 3 --out runs/own
    qtool quantize runs/own --mode ptq
    qtool export runs/own
    qtool benchmark runs/own

The later stages need the run directory alone. They run these functions again as long as this file is the one that
was recorded, and ask for ``--trust`` once it was changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SIZE = 16
SHAPES = ("bar", "cross", "ring")


class Gate(nn.Module):
    """A convolution whose output is scaled, channel by channel, by what it sees in the whole image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.weigh = nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return x * torch.sigmoid(self.weigh(nn.functional.adaptive_avg_pool2d(x, 1)))


def model() -> nn.Module:
    """A small net with squeeze-and-excitation, for :func:`data`."""
    return nn.Sequential(
        Gate(1, 16), nn.MaxPool2d(2), Gate(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(SHAPES))
    )


def data() -> dict[str, Any]:
    """Noisy drawings of three shapes. Without a ``validation`` part, a tenth of ``train`` is held out."""
    return {"train": _draw(900, seed=0), "test": _draw(300, seed=1), "labels": SHAPES}


def _draw(count: int, seed: int) -> TensorDataset:
    random = np.random.default_rng(seed)
    labels = np.arange(count) % len(SHAPES)
    images = random.normal(0, 0.25, (count, 1, SIZE, SIZE)).astype(np.float32)
    y, x = np.mgrid[:SIZE, :SIZE]
    for image, label in zip(images, labels, strict=True):
        (row, column), radius = random.integers(5, SIZE - 5, 2), random.integers(3, 5)
        down, across = abs(y - row), abs(x - column)
        bar = (across == 0) & (down <= radius)
        ring = np.rint(np.hypot(down, across)) == radius
        image[0] += (bar, bar | ((down == 0) & (across <= radius)), ring)[label]
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
