"""Padded pointwise convolutions with a stride: the same numbers, and the same sizes in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.exporting.passes import pointwise_pads
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def strided(size: tuple[int, ...], *, integer: bool, kernel: int = 1, group: int = 1, **given: Any) -> onnx.ModelProto:
    """A pointwise convolution behind another, between integers or not."""
    b, rank = Builder(), len(size)
    window = {"kernel_shape": [kernel] * rank, "group": group}
    options = {"strides": [2] * rank, "pads": [1] * rank + [2] * rank} | given
    if integer:
        x = b.pair(b.input("x", ["n", 6, *size]), 0.03, 110)
        a = b.pair(b.op("Conv", x, b.weight(8, 6, *[1] * rank), kernel_shape=[1] * rank), 0.05, 120)
        return b.model(b.op("Conv", a, b.weight(8, 8 // group, *[kernel] * rank), **window | options))
    weights = [b.random.normal(size=(8, channels, *[k] * rank)) for channels, k in ((6, 1), (8 // group, kernel))]
    a = b.op("Conv", b.input("x", ["n", 6, *size]), b.constant(weights[0], np.float32), kernel_shape=[1] * rank)
    return b.model(b.op("Conv", a, b.constant(weights[1], np.float32), **window | options))


@needs_vnni
@needs_openvino
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("size", [(7,), (7, 8), (4, 5, 6)])
def test_openvino_gives_the_sizes_and_the_numbers(size: tuple[int, ...], integer: bool, tmp_path: Path) -> None:
    model = strided(size, integer=integer)
    changed, rewritten = rewritten_by(pointwise_pads.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 6, *size)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    (found,), _ = run(rewritten, {"x": x}, tmp_path)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)
    ran = {kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op == "Convolution"}
    assert ran == {"int8" if integer else "float32"}


@pytest.mark.parametrize(
    "given",
    [{"pads": [0] * 4}, {"strides": [1, 1]}, {"kernel": 3}, {"group": 8}],
    ids=["no padding", "no stride", "wide", "grouped"],
)
def test_what_is_left_alone(given: dict[str, Any]) -> None:
    assert rewritten_by(pointwise_pads.apply, strided((7, 8), integer=True, **given))[0] == 0
