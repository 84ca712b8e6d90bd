"""The files and the data that the benchmarking tests measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_files
import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The residual net as fp32, fp16 and int8 files."""
    folder = tmp_path_factory.mktemp("benchmarking")
    fp32 = onnx_files.save_float(folder / "fp32.onnx")
    return {
        "fp32": fp32,
        "fp16": onnx_files.save_half(folder / "fp16.onnx"),
        "int8": onnx_files.save_int8(folder / "int8.onnx", fp32),
    }


@pytest.fixture(scope="session")
def batches():
    """Forty labelled images, in batches of any size, the last one short."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(40, 3, 8, 8)).astype(np.float32)
    labels = generator.integers(0, 10, 40)
    return lambda size: ((images[i : i + size], labels[i : i + size]) for i in range(0, 40, size))
