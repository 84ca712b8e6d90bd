r"""A task of your own: what a model's output is judged by, named on the command line as FILE:FUNCTION like the rest.

Here each pixel gets a class, and what counts is the mean intersection over union. Run from the repository's root::

    qtool train --model examples/own_task.py:model --data examples/own_task.py:data \
        --task examples/own_task.py:task --epochs 10 --learning-rate 5e-3 --out runs/task
    qtool quantize runs/task --max-drop 1
    qtool export runs/task
    qtool benchmark runs/task

The later stages know the task from the run directory. ``--max-drop`` and the benchmark's interval are of its metric.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SIZE = 24
CLASSES = ("ground", "disc", "square")


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each with its batch-norm."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net (arXiv 1505.04597) of three levels: N×1×H×W images to N×classes×H×W logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.middle = block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.join = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            x = down(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skipped.pop()], 1))
        return self.head(x)


class Segmentation:
    """Cross-entropy of every pixel, and the intersection over union of each class over the whole set."""

    name = "segmentation"
    metric = "mean_iou"
    higher_is_better = True

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """The sum over all pixels, and their number."""
        return F.cross_entropy(output, target, reduction="sum"), float(target.numel())

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Sums that add up over batches: pixels that are right, and each class's intersection and union."""
        found = output.argmax(1)
        sums = {"pixels": (found == target).sum()}
        for index, label in enumerate(CLASSES):
            sums[f"{label} both"] = ((found == index) & (target == index)).sum()
            sums[f"{label} either"] = ((found == index) | (target == index)).sum()
        return sums

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """What is no mean of pixels is made of the means, once, at the end."""
        shares = [means[f"{label} both"] / means[f"{label} either"] for label in CLASSES]
        return {"loss": means["loss"], "mean_iou": sum(shares) / len(shares), "pixels": means["pixels"]}


def task() -> Segmentation:
    """What outputs of :func:`model` are judged by."""
    return Segmentation()


def model() -> nn.Module:
    """A network for :func:`data`."""
    return UNet()


def data() -> dict[str, Any]:
    """Noisy drawings of discs and squares, and the class of every pixel."""
    return {"train": _draw(480, seed=0), "validation": _draw(80, seed=1), "test": _draw(80, seed=2)}


def _draw(count: int, seed: int) -> TensorDataset:
    random = np.random.default_rng(seed)
    targets = np.zeros((count, SIZE, SIZE), np.int64)
    y, x = np.mgrid[:SIZE, :SIZE]
    for target in targets:
        for label in (1, 2):
            (row, column), radius = random.integers(5, SIZE - 5, 2), random.integers(3, 6)
            down, across = abs(y - row), abs(x - column)
            target[(np.hypot(down, across) if label == 1 else np.maximum(down, across)) <= radius] = label
    images = (targets > 0) + random.normal(0, 0.3, targets.shape)
    return TensorDataset(torch.from_numpy(images[:, None].astype(np.float32)), torch.from_numpy(targets))
