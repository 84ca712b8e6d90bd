"""Antialiased resizings as matrix products: torch's numbers, also in OpenVINO, in the size that is predicted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, needs_vnni, rewritten_by, run
from resizes import TORCH, declared, resized
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting import to_onnx
from qtool.exporting.gates.end_to_end import SAMPLED, end_to_end
from qtool.exporting.passes import smooth_resizes
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session


@pytest.mark.parametrize(
    ("mode", "sizes"), [("bilinear", (7, 9)), ("bicubic", (7, 9)), ("bilinear", (16, 5)), ("bicubic", (20, 40))]
)
def test_the_numbers_are_torchs(mode: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    told = {"mode": "cubic", "cubic_coeff_a": -0.5} if mode == "bicubic" else {}
    changed, rewritten = rewritten_by(smooth_resizes.apply, resized(list(sizes), **told))
    assert changed == 1
    assert {node.op_type for node in rewritten.graph.node} == {"MatMul"}
    onnx.checker.check_model(rewritten, full_check=True)
    x = torch.randn(3, 2, 16, 19, generator=torch.Generator().manual_seed(0))
    found = run(rewritten, {"x": x.numpy()}, tmp_path)[0][0]
    np.testing.assert_allclose(found, F.interpolate(x, sizes, mode=mode, antialias=True).numpy(), atol=1e-5)


def test_a_factor_says_where_numbers_lie(tmp_path: Path) -> None:
    b = Builder()
    scales = b.constant([1, 1, 0.3, 1.7], np.float32)
    model = b.model(b.op("Resize", b.input("x", ["n", 2, 16, 19]), "", scales, mode="linear", **TORCH))
    changed, rewritten = rewritten_by(smooth_resizes.apply, declared(model, ["n", 2, 4, 32]))
    assert changed == 1
    x = torch.randn(3, 2, 16, 19, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(x, scale_factor=(0.3, 1.7), mode="bilinear", antialias=True).numpy()
    np.testing.assert_allclose(run(rewritten, {"x": x.numpy()}, tmp_path)[0][0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        resized([32, 19]), resized([7, 9], antialias=0), resized([7, 9], ("n", 2, "height", 19)),
        resized([7, 9], coordinate_transformation_mode="align_corners"), resized([3, 7, 9], ("n", 2, 5, 16, 19)),
    ],
    ids=["larger", "sampled", "unknown", "corners", "three axes"],
)  # fmt: skip
def test_others_are_left(model: onnx.ModelProto) -> None:
    assert rewritten_by(smooth_resizes.apply, model)[0] == 0


class Shrunk(nn.Module):
    """Two convolutions, and images of other sizes between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        smaller = F.interpolate(F.relu(self.first(x)), size=(20, 30), mode="bilinear", antialias=True)
        return F.interpolate(self.second(smaller), size=(20, 40), mode="bicubic", antialias=True)


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_averages_in_floats_and_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 40, 40), Shrunk().eval()
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    result = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[x])
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    for name, expected in (("fp32", model(x)), ("int8", form(x))):
        (found,) = open_session(result.files[name], provider="openvino").run({"x": x.numpy()})
        off = np.abs(found - expected.detach().numpy())
        share = 0.01 if name == "int8" else 0  # in a sum of another order a tie may round elsewhere
        assert (off > 1e-5).mean() <= share
        assert off.max() < 0.02


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_of_open_sizes_it_is_told_that_openvino_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, config = torch.randn(4, 3, 40, 40), QuantizeConfig(target="openvino", effort="fast", dynamic_axes=(2,))
    form = quantize(Shrunk().eval(), config, example=x, calibration=[x])
    to_onnx.save(to_onnx.quantized_to_onnx(form, 20), tmp_path / "net.onnx")
    gate = end_to_end(form, tmp_path / "net.onnx", [x])
    assert (gate.passed, gate.do) == (False, SAMPLED)
