"""Channels of integers that are padded: the same numbers, and the right ones in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.exporting.passes import channel_pads
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def padded(amounts: list[int], *, cut: str = "", value: float = 0.0, integer: bool = True) -> onnx.ModelProto:
    """A convolution over channels that are cut ``ahead`` of a padding or ``behind`` it."""
    b = Builder()
    x = b.input("x", ["n", 4, 5, 6])
    y, channels = (b.pair(x, 0.03, 100) if integer else x), 4 + amounts[1] + amounts[5]
    told = [b.constant([number], np.int64) for number in (1, 3, 1)]
    if cut == "ahead":
        y, channels = b.op("Slice", y, *told), channels - 2
    y = b.op("Pad", y, b.constant(amounts, np.int64), b.constant(value, np.float32))
    y = b.pair(y, 0.03, 100)
    if cut == "behind":
        y, channels = b.op("Slice", y, *told), 2
    return b.model(b.op("Conv", y, b.weight(5, channels, 3, 3)))


@needs_vnni
@needs_openvino
@pytest.mark.parametrize("cut", ["", "ahead", "behind"])
@pytest.mark.parametrize("amounts", [[0, 0, 0, 0, 0, 2, 0, 0], [0, 1, 0, 1, 0, 0, 0, 1], [0, -1, 0, 0, 0, 2, 0, 0]])
def test_openvino_convolves_the_same_numbers_in_integers(cut: str, amounts: list[int], tmp_path: Path) -> None:
    model = padded(amounts, cut=cut)
    changed, rewritten = rewritten_by(channel_pads.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    np.testing.assert_allclose(run(rewritten, {"x": x}, tmp_path)[0][0], expected, atol=1e-5)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)
    assert [kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op == "Convolution"] == ["int8"]


@pytest.mark.parametrize(
    "model",
    [
        padded([0, 0, 1, 1, 0, 0, 1, 1]), padded([0, 1, 0, 0, 0, 0, 0, 0], value=1.0),
        padded([0, 1, 0, 0, 0, 0, 0, 0], integer=False),
    ],
)  # fmt: skip
def test_other_paddings_stay(model: onnx.ModelProto) -> None:
    assert rewritten_by(channel_pads.apply, model)[0] == 0
