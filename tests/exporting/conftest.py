"""A small net with what tuning is about: SiLU, a depthwise convolution, a squeeze-excite gate, a residual sum."""

from __future__ import annotations

import pytest
import torch
from nets_modern import MobileBlock, SqueezeExcite
from torch import nn

from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


@pytest.fixture(scope="package")
def gated() -> tuple[QuantizedModel, torch.Tensor]:
    torch.manual_seed(0)
    gate = SqueezeExcite(16, 4, nn.SiLU(), nn.Sigmoid())
    body = MobileBlock(8, 16, 8, 3, 1, nn.SiLU, gate)
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), body, *tail).eval()
    x = torch.randn(8, 3, 12, 12)
    return quantize(model, QuantizeConfig(), example=x[:2], calibration=[x]), x
