"""One set of files for all the runtimes' tests."""

from __future__ import annotations

from pathlib import Path

import onnx_files
import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The residual net as fp32, fp16 and int8 files."""
    folder = tmp_path_factory.mktemp("runtimes")
    fp32 = onnx_files.save_float(folder / "fp32.onnx")
    return {
        "fp32": fp32,
        "fp16": onnx_files.save_half(folder / "fp16.onnx"),
        "int8": onnx_files.save_int8(folder / "int8.onnx", fp32),
    }
