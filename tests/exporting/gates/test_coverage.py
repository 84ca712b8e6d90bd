"""The coverage gate reads the runtime's graph: what copies integers is integer, also where a pair is left behind it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import ContractError
from qtool.exporting.gates.coverage import coverage
from qtool.exporting.passes import behind_layers
from qtool.exporting.stage import export
from qtool.exporting.to_onnx import PASSES, quantized_to_onnx, save
from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Correlated(nn.Module):
    """Shifted copies of padded features times other features, as cost volumes of optical flow are made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.conv(x), F.pad(self.conv(y), (1, 1, 1, 1))
        return torch.stack([(first * second[:, :, i : i + 8, :8]).mean(1) for i in range(3)], 1)


def form_of(model: nn.Module, *inputs: Tensor) -> QuantizedModel:
    torch.manual_seed(0)
    return quantize(model.eval(), QuantizeConfig(), example=inputs, calibration=[inputs])


def test_a_padding_of_bytes_is_integer_whatever_is_left_behind_it(tmp_path: Path) -> None:
    form = form_of(Correlated(), torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8))
    assert "pad" in {unit.name for unit in form.plan.integer_units}
    save(quantized_to_onnx(form, 21), tmp_path / "a.onnx")
    assert coverage(form.plan, tmp_path / "a.onnx").passed


@pytest.mark.parametrize("operator", [lambda x: F.max_pool2d(x, 2), lambda x: F.interpolate(x, scale_factor=2.0)])
def test_a_copy_of_floats_is_told(operator: object, tmp_path: Path) -> None:
    """A copy whose quantizer was given another scale than its input's runs in float."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(operator(self.first(x)))  # type: ignore[operator]

    form = form_of(Net(), torch.randn(4, 3, 8, 8))
    model = quantized_to_onnx(form, 21)
    save(model, tmp_path / "a.onnx")
    assert coverage(form.plan, tmp_path / "a.onnx").passed
    pair = [node for node in model.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    name = next(u.name for u in form.plan.integer_units if u.kind in ("max_pool", "upsample"))
    for node in pair:
        if (node.name or "").startswith(f"{name}/"):
            node.replace_input_with(1, next(n for n in pair if (n.name or "").startswith("x/")).inputs[1])
    save(model, tmp_path / "b.onnx")
    gate = coverage(form.plan, tmp_path / "b.onnx")
    assert not gate.passed
    assert name in gate.found


class Heads(nn.Module):
    """One head for two sizes of features with a scale for each, as detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(scale)) for scale in (1.5, 0.7))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.stem(x).relu()
        levels = (features, F.max_pool2d(features, 2))
        return [self.head(level) * scale for level, scale in zip(levels, self.scales, strict=True)]


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_layers_that_openvino_renames_and_runs_in_float_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 12, 12)
    config = QuantizeConfig(target="openvino", effort="fast")
    form = quantize(Heads().eval(), config, example=x, calibration=[x])
    factors_left = tuple(rewrite for rewrite in PASSES["openvino"] if rewrite is not behind_layers.apply)
    monkeypatch.setitem(PASSES, "openvino", factors_left)
    with pytest.raises(ContractError, match="in float: head, head_2"):
        export(form, tmp_path, ExportConfig(baselines=None), samples=[x])


class Twins(nn.Module):
    """Two layers of equal weights that read one input, as those that begin as zeros do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
        self.second.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu() + self.second(x).relu())


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_layers_that_compute_the_same_are_both_there_or_one_runs_for_both(target: str, tmp_path: Path) -> None:
    if target == "openvino":
        pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    form = quantize(Twins().eval(), QuantizeConfig(target=target, effort="fast"), example=x, calibration=[x])
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    layers = [node.name for node in ir.load(exported.files["int8"]).graph if node.op_type == "Conv"]
    assert len(layers) == 3
