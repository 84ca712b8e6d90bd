"""A learned slope that is one for all channels: a leaky ReLU with an integer kernel, and the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qtool.exporting.stage import export
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.slopes import write_slopes
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QatConfig, QuantizeConfig

X = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def net(*slopes: float) -> nn.Module:
    torch.manual_seed(0)
    activation = nn.PReLU(len(slopes))
    with torch.no_grad():
        activation.weight.copy_(torch.tensor(slopes))
    return nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Conv2d(4, 4, 3)).eval()


@pytest.mark.parametrize(
    ("slopes", "written"),
    [((0.25,), True), ((-0.1,), True), ((0.3, 0.3, 0.3, 0.3), True), ((0.1, 0.2, 0.3, 0.4), False)],
)
def test_one_slope_is_a_leaky_relu(slopes: tuple[float, ...], written: bool) -> None:
    model = net(*slopes)
    graph = capture(model, X)
    assert write_slopes(graph) == written
    assert {node.target for node in graph.graph.nodes} & {aten.leaky_relu.default, aten.prelu.default} == {
        aten.leaky_relu.default if written else aten.prelu.default
    }
    torch.testing.assert_close(graph(X), model(X))


def test_it_runs_in_integers(tmp_path: Path) -> None:
    form = quantize(net(0.25), QuantizeConfig(effort="fast"), example=X, calibration=[X])
    assert not form.plan.float_units
    export(form, tmp_path, ExportConfig(baselines=None), samples=[X])


@pytest.mark.parametrize("freeze_bn", [0.0, 0.5])
def test_a_slope_trains_where_batch_norms_do_and_is_integer_where_not(freeze_bn: float) -> None:
    before: list[Any] = []

    def keep(graph: nn.Module, *_: Any) -> None:
        before.extend(name for name, value in graph.named_parameters() if value.shape == (1,) and value.requires_grad)

    config = QuantizeConfig(mode="qat", effort="fast")
    tuning = QatConfig(freeze_bn=freeze_bn)
    made = quantize(net(0.25), config, example=X, calibration=[X], qat=keep, tuning=tuning)
    assert bool(before) is bool(made.plan.float_units) is (freeze_bn > 0)
