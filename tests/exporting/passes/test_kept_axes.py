from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from qdq_files import needs_vnni
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Pooled(nn.Module):
    """A classifier over tokens, as speech models have it: a layer without a bias, what they come to, a layer."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.classify, self.reduce = nn.Linear(32, 64, bias=False), nn.Linear(64, 3), reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.reduce(self.project(x)))


class Summed(Pooled):
    """The same of a sum of two layers, which is integer."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__(reduce)
        self.other = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.reduce(self.project(x) + self.other(x)))


class Excite(nn.Module):
    """Rows that are weighed by what they come to."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.reduce = nn.Linear(12, 12), reduce

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.reduce(x).flatten(1)).sigmoid()[..., None]


class Excited(nn.Sequential):
    """A module with an unsqueezing of its own beside the maximum."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.GELU(), Excite(reduce), nn.Linear(32, 3))


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        (Pooled, lambda y: y.mean(1)),
        (Pooled, lambda y: y.amax(1)),
        (Pooled, lambda y: y.cos().amin(1, keepdim=True)),
        (Pooled, lambda y: torch.cat([y.cos().amax(1), y.sin().amin(1)], 1)[:, :64]),
        (Summed, lambda y: y[:, 1:].mean(1)),
        (Excited, lambda y: y.amax(2, keepdim=True)),
    ],
)
def test_openvino_gives_what_tokens_come_to(
    model: Callable[..., nn.Module], reduce: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = [torch.randn(16, 12, 32) + 0.5 for _ in range(2)]
    config = QuantizeConfig(target="openvino", effort="fast")
    form = quantize(model(reduce).eval(), config, example=x[0], calibration=x)
    gates = {gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=x).gates}
    assert gates["end-to-end parity"]["passed"]
