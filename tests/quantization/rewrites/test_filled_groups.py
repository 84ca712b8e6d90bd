"""Groups that are filled up with zeros: the same numbers from wider convolutions, in integers and while training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qdq_files import needs_vnni
from torch import Tensor, nn
from torch.fx import Node

import qtool
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.filled_groups import fill_groups


class Groups(nn.Sequential):
    """What makes channels, a convolution of groups of 24, and a last one."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__(*before, nn.Conv2d(48, 48, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(48, 4, 1))


def of_groups(conv: Node) -> int:
    return 32 if len(conv.args) > 6 and conv.args[6] == 2 else 0


def settled() -> Groups:
    torch.manual_seed(0)
    model = Groups(nn.Conv2d(3, 48, 1), nn.BatchNorm2d(48), nn.SiLU())
    model(torch.randn(8, 3, 6, 6))
    return model.eval()


@pytest.mark.parametrize("train", [False, True])
def test_it_computes_what_the_model_does(train: bool) -> None:
    model, x = settled(), torch.randn(4, 3, 6, 6)
    graph = capture(model, x, train=True) if train else float_form(model, x)
    assert fill_groups(graph, {}, of_groups) == 1
    wide = next(node for node in graph.graph.nodes if node.args[6:] and node.args[6] == 2)
    assert wide.args[0].meta["val"].shape[1] == 64
    if train:
        model.train()
        graph(x).square().sum().backward()
        rows = graph.get_submodule("0").weight.grad.unflatten(0, (2, 32))
        assert not rows[:, 24:].any()
        assert rows[:, :24].any()
    torch.testing.assert_close(graph(x), model(x))


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rest = nn.Conv2d(3, 48, 1), Groups()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, self.rest(y)


@pytest.mark.parametrize("model", [Split(), Groups(nn.Conv2d(3, 48, 1), nn.MaxPool2d(2)), Groups(nn.ReLU())])
def test_channels_that_cannot_be_made_more_stay_as_they_are(model: nn.Module) -> None:
    x = torch.randn(2, 48 if isinstance(model, Groups) and isinstance(model[0], nn.ReLU) else 3, 6, 6)
    graph = capture(model.eval(), x)
    before = graph.code
    assert fill_groups(graph, {}, of_groups) == 0
    assert graph.code == before


@needs_vnni
def test_a_regnets_groups_are_integer_for_openvino(tmp_path: Path) -> None:
    model, batches = settled(), [torch.randn(8, 3, 6, 6) for _ in range(2)]
    quantized = qtool.quantize(model, batches, target="openvino")
    assert not quantized.plan.float_units
    qtool.export(quantized, tmp_path, samples=batches, baselines=None)  # passes its gates
    kept = qtool.quantize(model, batches, target="openvino", overrides={"3": "float"})
    assert "3" in {unit.name for unit in kept.plan.float_units}
