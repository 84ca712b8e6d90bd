"""Quantizers behind what is joined along other axes than channels: the same numbers, and integers in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, needs_vnni, rewritten_by, run
from torch import Tensor, nn

from qtool.exporting.passes import joins
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def joined(size: tuple[int, ...], axis: int, reader: str = "Conv") -> onnx.ModelProto:
    """Two parts with a scale each, joined and rounded, and a layer over them; the parts have 6 channels or features."""
    b = Builder()
    x = b.input("x", ["n", *size])
    parts = [b.pair(x, 0.0317, 110), b.pair(b.op("Neg", b.pair(x, 0.0317, 110)), 0.0523, 90)]
    whole = b.pair(b.op("Concat", *parts, axis=axis), 0.0419, 120)
    if reader == "Conv":
        channels = 12 if axis == 1 else 6
        return b.model(b.op("Conv", whole, b.weight(5, channels, *[1] * (len(size) - 1))))
    return b.model(b.op("MatMul", whole, b.weight(12 if axis in (-1, len(size)) else 6, 5, axis=1)))


@needs_openvino
@pytest.mark.parametrize(
    ("size", "axis", "reader"),
    [
        ((6, 4, 5), 2, "Conv"), ((6, 4, 5), -1, "Conv"), ((6, 9), 2, "Conv"), ((7, 6), 1, "MatMul"),
        ((3, 4, 6), 1, "MatMul"),
    ],
)  # fmt: skip
def test_openvino_multiplies_integers_to_the_same_numbers(
    size: tuple[int, ...], axis: int, reader: str, tmp_path: Path
) -> None:
    model = joined(size, axis, reader)
    changed, rewritten = rewritten_by(joins.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, *size)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    np.testing.assert_allclose(run(rewritten, {"x": x}, tmp_path)[0][0], expected, atol=1e-5)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)
    ran = [kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op in ("Convolution", "FullyConnected")]
    assert ran == ["int8"]


@pytest.mark.parametrize("model", [joined((6, 4, 5), 1), joined((7, 6), 2, "MatMul"), joined((6,), 1, "MatMul")])
def test_channels_are_joined_as_they_are(model: onnx.ModelProto) -> None:
    assert rewritten_by(joins.apply, model)[0] == 0


def cut_again(zero: int) -> onnx.ModelProto:
    """Joined channels of which a convolution reads some."""
    b = Builder()
    x = b.input("x", ["n", 3, 4, 5])
    y = b.op("Concat", b.pair(x, 0.0317, zero), b.pair(b.op("Neg", b.pair(x, 0.0317, zero)), 0.0523, zero), axis=1)
    cut = b.op("Slice", b.pair(y, 0.0419, zero), *(b.constant([number], np.int64) for number in (1, 5, 1)))
    return b.model(b.op("Conv", cut, b.weight(5, 4, 1, 1)))


@needs_openvino
@pytest.mark.parametrize(("zero", "kept"), [(120, 1), (0, 0)])
def test_openvino_convolves_integers_of_joined_channels_that_are_cut_again(
    zero: int, kept: int, tmp_path: Path
) -> None:
    model = cut_again(zero)
    changed, rewritten = rewritten_by(joins.apply, model)
    assert changed == kept
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)
    assert [kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op == "Convolution"] == ["int8"]


@needs_openvino
def test_openvino_subtracts_the_zero_point_of_each_part_where_all_have_one_scale(tmp_path: Path) -> None:
    b = Builder()
    x = b.input("x", ["n", 3, 4, 5])
    parts = [b.pair(b.op(name, b.pair(x, 0.0317, 120)), 0.0419, zero) for name, zero in (("Tanh", 139), ("Neg", 88))]
    whole = b.pair(b.op("Concat", *parts, axis=1), 0.0419, 120)
    cut = b.op("Slice", whole, *(b.constant([number], np.int64) for number in (1, 5, 1)))
    model = b.model(b.op("Conv", cut, b.weight(5, 4, 1, 1)))
    changed, rewritten = rewritten_by(joins.apply, model)
    assert changed == 1
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)


class Tokens(nn.Module):
    """Tokens of two layers, one behind the other, and a layer that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(torch.cat([self.left(x), torch.relu(self.right(x[:, :2]))], 1))


@needs_vnni
@needs_openvino
def test_a_layer_over_joined_tokens_passes_every_gate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8)
    form = quantize(Tokens().eval(), QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    gates = {
        gate["name"]: gate["passed"] for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates
    }
    assert gates["coverage"] is gates["unit parity"] is gates["end-to-end parity"] is True
