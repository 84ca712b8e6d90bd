"""Strides of pointwise convolutions as poolings: the same numbers, and integers in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, needs_vnni, rewritten_by, run
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import ContractError
from qtool.exporting import to_onnx
from qtool.exporting.passes import strides
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def convolutions(*given: dict[str, Any], size: tuple[int, ...] = (7, 8), kernel: int = 1) -> onnx.ModelProto:
    """Convolutions of one dequantized input."""
    b = Builder()
    x = b.pair(b.input("x", ["n", 6, *size]), 0.03, 110)
    window = {"kernel_shape": [kernel] * len(size)}
    shape = (5, 6, *[kernel] * len(size))
    return b.model(*(b.op("Conv", x, b.weight(*shape), **window | more) for more in given))


@pytest.mark.parametrize("size", [(7,), (7, 8), (4, 5, 6)])
@pytest.mark.parametrize("readers", [1, 2])
def test_the_numbers_are_the_same(size: tuple[int, ...], readers: int, tmp_path: Path) -> None:
    model = convolutions(*[{"strides": [2] * len(size)}] * readers, size=size)
    changed, rewritten = rewritten_by(strides.apply, model)
    assert changed == readers
    onnx.checker.check_model(rewritten, full_check=True)
    assert [node.op_type for node in rewritten.graph.node].count("MaxPool") == 1
    x = np.random.default_rng(0).normal(size=(2, 6, *size)).astype(np.float32)
    before, after = (run(each, {"x": x}, tmp_path)[0] for each in (model, rewritten))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        convolutions({}),
        convolutions({"strides": [1, 1]}),
        convolutions({"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        convolutions({"strides": [2, 2]}, kernel=3),
        convolutions({"strides": [2, 2]}, {"strides": [1, 1]}),
        convolutions({"strides": [2, 2]}, {"strides": [2, 3]}),
        convolutions({"strides": [2, 2]}, {}),
    ],
    ids=["none", "one", "padded", "wide", "one of one", "different", "one without"],
)
def test_what_is_left_alone(model: onnx.ModelProto) -> None:
    assert rewritten_by(strides.apply, model)[0] == 0


class Projected(nn.Module):
    """A residual sum read by two strided pointwise convolutions alone, as in the first ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.left, self.right = nn.Conv2d(16, 24, 1, 2), nn.Conv2d(16, 24, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.inner(x))
        return (F.relu(self.left(x)) + self.right(x)).mean((2, 3))


@needs_vnni
@needs_openvino
def test_openvino_convolves_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = [torch.randn(8, 3, 20, 20) for _ in range(2)]
    form = quantize(Projected().eval(), QuantizeConfig(target="openvino", effort="fast"), example=x[0], calibration=x)
    coverage = next(
        g for g in export(form, tmp_path, ExportConfig(baselines=None), samples=x).gates if g["name"] == "coverage"
    )
    assert coverage["details"]["arithmetic"] == {"int8": 4}
    monkeypatch.setitem(
        to_onnx.PASSES, "openvino", tuple(p for p in to_onnx.PASSES["openvino"] if p is not strides.apply)
    )
    with pytest.raises(ContractError, match=r"in float: left, right; leave those units in float"):
        export(form, tmp_path, ExportConfig(baselines=None), samples=x)
