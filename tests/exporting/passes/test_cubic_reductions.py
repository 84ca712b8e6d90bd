"""Cubic resizings that sample as matrix products: torch's numbers, where ONNX Runtime itself has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, rewritten_by, run
from resizes import declared, resized
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting.passes import cubic_reductions
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

SAMPLED: dict[str, Any] = {"mode": "cubic", "cubic_coeff_a": -0.75, "antialias": 0, "exclude_outside": 0}


def images() -> Tensor:
    return torch.randn(3, 2, 16, 19, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("sizes", [(7, 9), (16, 5), (40, 9), (1, 1)])
def test_the_numbers_are_torchs(sizes: tuple[int, int], corners: bool, tmp_path: Path) -> None:
    way = "align_corners" if corners else "half_pixel"
    model = resized(list(sizes), **SAMPLED, coordinate_transformation_mode=way)
    changed, rewritten = rewritten_by(cubic_reductions.apply, model)
    assert changed == 1
    assert {node.op_type for node in rewritten.graph.node} == {"MatMul"}
    onnx.checker.check_model(rewritten, full_check=True)
    found = run(rewritten, {"x": images().numpy()}, tmp_path)[0][0]
    expected = F.interpolate(images(), sizes, mode="bicubic", align_corners=corners)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_a_factor_says_where_numbers_lie(tmp_path: Path) -> None:
    b = Builder()
    scales = b.constant([1, 1, 0.3, 1.7], np.float32)
    model = b.model(b.op("Resize", b.input("x", ["n", 2, 16, 19]), "", scales, **SAMPLED))
    changed, rewritten = rewritten_by(cubic_reductions.apply, declared(model, ["n", 2, 4, 32]))
    assert changed == 1
    expected = F.interpolate(images(), scale_factor=(0.3, 1.7), mode="bicubic").numpy()
    np.testing.assert_allclose(run(rewritten, {"x": images().numpy()}, tmp_path)[0][0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        resized([32, 38], **SAMPLED), resized([7, 9], **SAMPLED | {"mode": "linear"}),
        resized([7, 9], ("n", 2, "height", 19), **SAMPLED),
        resized([7, 9], **SAMPLED, coordinate_transformation_mode="asymmetric"),
        resized([7, 9], **SAMPLED | {"antialias": 1}),
    ],
    ids=["larger", "linear", "unknown", "other coordinates", "averaged"],
)  # fmt: skip
def test_others_are_left(model: onnx.ModelProto) -> None:
    assert rewritten_by(cubic_reductions.apply, model)[0] == 0


class Thumbnails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.interpolate(F.relu(self.first(x)), size=(33, 47), mode="bicubic"))  # type: ignore[no-any-return]


def test_every_file_gives_what_torch_gives(tmp_path: Path) -> None:
    """With more weights in the products than the size gate would let by unpredicted."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 64, 64), Thumbnails().eval()
    form = quantize(model, QuantizeConfig(effort="fast"), example=x, calibration=[x])
    result = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[x])
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    (found,) = open_session(result.files["fp32"], provider="cpu").run({"x": x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)
