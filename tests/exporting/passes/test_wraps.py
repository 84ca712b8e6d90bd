"""Circular paddings as concatenations: the same numbers, and integers in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, needs_vnni, rewritten_by, run
from torch import nn

from qtool.exporting.passes import wraps
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


def wrapped(amounts: list[int], mode: str = "wrap", integer: bool = False) -> onnx.ModelProto:
    b = Builder()
    x = b.input("x", ["n", 2, 5, 6])
    y = b.op("Pad", b.pair(x, 0.03, 100) if integer else x, b.constant(amounts, np.int64), mode=mode)
    return b.model(b.pair(y, 0.03, 100) if integer else b.op("Neg", y))


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("amounts", [[0, 0, 1, 2, 0, 0, 3, 0], [0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0]])
def test_the_numbers_are_the_same(amounts: list[int], integer: bool, tmp_path: Path) -> None:
    model = wrapped(amounts, integer=integer)
    changed, rewritten = rewritten_by(wraps.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 6)).astype(np.float32)
    before, after = (run(each, {"x": x}, tmp_path)[0][0] for each in (model, rewritten))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("model", [wrapped([0, 0, 1, 1] * 2, "reflect"), wrapped([0, 0, -1, 1] * 2)])
def test_other_paddings_are_left(model: onnx.ModelProto) -> None:
    assert rewritten_by(wraps.apply, model)[0] == 0


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_runs_a_convolution_over_a_ring_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    result = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[x])
    gates = {gate["name"]: gate["passed"] for gate in result.gates}
    assert gates["coverage"] is gates["end-to-end parity"] is True
    assert not any(node.op_type == "Pad" for node in onnx.load(result.files["fp32"]).graph.node)
