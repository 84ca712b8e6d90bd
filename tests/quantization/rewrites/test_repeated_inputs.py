"""Depthwise convolutions with several outputs for each channel have a copy of the channel for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from qtool.exporting.stage import export
from qtool.graphs.operators import CONVOLUTIONS, groups_of
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.repeated_inputs import repeat_inputs
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes.ort import optimized_graph

COPIED = {
    "two outputs": (nn.Conv2d(6, 12, 3, padding=1, groups=6), (6, 9, 8)),
    "three, at a stride, dilated": (nn.Conv2d(4, 12, 5, stride=2, padding=2, dilation=2, groups=4), (4, 16, 16)),
    "no bias": (nn.Conv2d(4, 8, (3, 1), groups=4, bias=False), (4, 9, 8)),
    "sequences": (nn.Conv1d(6, 12, 3, stride=2, groups=6), (6, 15)),
}
LEFT = {
    "one output": (nn.Conv2d(6, 6, 3, groups=6), (6, 9, 8)),
    "groups of two": (nn.Conv2d(6, 12, 3, groups=3), (6, 9, 8)),
    "one channel": (nn.Conv2d(1, 4, 3), (1, 9, 8)),
    "far more places read than given": (nn.Conv2d(4, 8, (16, 1), groups=4), (4, 16, 8)),
    "volumes": (nn.Conv3d(4, 8, 3, groups=4), (4, 5, 5, 5)),
}


def layer_groups(graph: torch.fx.GraphModule) -> list[int]:
    return [groups_of(node) for node in graph.graph.nodes if node.target in CONVOLUTIONS]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", COPIED)
def test_it_is_the_same_convolution_with_a_group_for_each_output(name: str, train: bool) -> None:
    torch.manual_seed(0)
    conv, shape = COPIED[name]
    x = torch.randn(3, *shape)
    graph = capture(conv, x, train=train)
    assert repeat_inputs(graph, {}) == 1
    assert layer_groups(graph) == [conv.out_channels]
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), conv(batch))


def test_sizes_may_be_open() -> None:
    conv = nn.Conv2d(6, 12, 3, padding=1, groups=6)
    graph = capture(conv, torch.randn(3, 6, 9, 8), axes=(2, 3))
    assert repeat_inputs(graph, {}) == 1
    x = torch.randn(2, 6, 12, 7)
    torch.testing.assert_close(graph(x), conv(x))


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    conv, shape = LEFT[name]
    graph = capture(conv, torch.randn(3, *shape))
    assert not repeat_inputs(graph, {})


@pytest.mark.parametrize(("overrides", "groups"), [({}, 64), ({"1": "float"}, 32)])
def test_the_runtime_has_its_depthwise_kernel_for_it(overrides: dict[str, str], groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 7, 2, 3, groups=32), nn.Conv2d(64, 4, 1)).eval()
    x = torch.randn(8, 3, 16, 16)
    form = quantize(net, QuantizeConfig(effort="fast", overrides=overrides), example=x, calibration=[x])
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    nodes = optimized_graph(exported.files["int8"], weights=False).graph.node
    found = [a.i for node in nodes if "Conv" in node.op_type for a in node.attribute if a.name == "group"]
    assert max(found) == groups
