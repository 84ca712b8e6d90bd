from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Pooled(nn.Module):
    """A classifier over tokens, as speech models have it: a layer without a bias, their mean, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.classify = nn.Linear(32, 64, bias=False), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.project(x).mean(1))


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_gives_the_mean_of_a_product_without_a_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = [torch.randn(16, 12, 32) + 0.5 for _ in range(2)]
    form = quantize(Pooled().eval(), QuantizeConfig(target="openvino", effort="fast"), example=x[0], calibration=x)
    gates = {gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(), samples=x).gates}
    assert gates["end-to-end parity"]["passed"]
