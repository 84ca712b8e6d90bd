"""Small sets that the tests of data write or hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset


def images(count: int, shape: tuple[int, ...] = (6, 5), classes: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"images": draw.integers(0, 256, (count, *shape), dtype=np.uint8), "labels": np.arange(count) % classes}


def mapping(**changes: Any) -> dict[str, Any]:
    return {
        "train": TensorDataset(torch.randn(40, 3), torch.arange(40) % 4),
        "test": TensorDataset(torch.randn(8, 3), torch.arange(8) % 4),
    } | changes


def write_folder(
    path: Path, count: int = 4, size: tuple[int, int] = (6, 8), mode: str = "RGB"
) -> dict[str, np.ndarray]:
    image = pytest.importorskip("PIL.Image")
    draw, stored = np.random.default_rng(0), {}
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (*size, 3) if mode == "RGB" else size, dtype=np.uint8)
                image.fromarray(pixels).save(path / part / name / f"{i}.png")
                stored[f"{part}/{name}/{i}"] = pixels
    return stored
