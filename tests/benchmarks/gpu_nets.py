"""Models and data for ``bench_gpu.py``, named there as FILE.py:factory; images are noise."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from qtool.models.vit import VisionTransformer

sys.path.insert(0, str(Path(__file__).parent.parent))


DIFFERENT = 1024


def small_vit() -> nn.Module:
    """A quarter of a million parameters, for a look at the script itself."""
    torch.manual_seed(0)
    return VisionTransformer(10, image=32, patch=8, layers=3, width=64, heads=4, hidden=256)


def vit_b_16() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(10, image=224, patch=16, layers=12, width=768, heads=12, hidden=3072)


def resnet50() -> nn.Module:
    import nets

    torch.manual_seed(0)
    return nets.settled(nets.resnet50(), 224, batches=2)


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """``count`` images of ``size``×``size`` pixels in ten classes; the same number gives the same image.

    There are ``DIFFERENT`` of them, which are made once: a GPU would wait for more.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.targets = torch.arange(count) % 10
        self.made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        key = index % DIFFERENT
        if key not in self.made:
            self.made[key] = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(key))
        return self.made[key], index % 10


def images() -> dict[str, Dataset[tuple[torch.Tensor, int]]]:
    return {"train": Noise(2048, 224), "test": Noise(64, 224)}


def small_images() -> dict[str, Dataset[tuple[torch.Tensor, int]]]:
    return {"train": Noise(128, 32), "test": Noise(16, 32)}
