"""Slices behind padded convolutions become smaller paddings, and every number stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting.stage import export
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.chomps import drop_chomps
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

Cut = Callable[[Tensor], Tensor]


class Cutting(nn.Module):
    """A convolution and what is cut off it."""

    def __init__(self, cut: Cut, rank: int = 1, **options: Any) -> None:
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](4, 6, 3, **{"padding": 2, **options})
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.conv(x)).relu()


def dropped(model: nn.Module, rank: int = 1) -> tuple[int, list[str]]:
    """How many slices went, and the operators left; the graph computes the same for every batch."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *[8, 7, 6][:rank])
    graph = capture(model.eval(), x)
    count = drop_chomps(graph)
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-5, atol=1e-6)
    for node in graph.graph.nodes:  # what later passes read of shapes is true
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            assert node.meta["val"].shape[1:].numel() > 0
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"]
    return count, [name for name in names if name != "sym_size"]


CHOMPS: dict[str, tuple[Cut, int, dict[str, Any], list[str]]] = {
    "causal": (lambda y: y[:, :, :-2], 1, {}, ["constant_pad_nd", "conv1d", "relu"]),
    "dilated": (lambda y: y[..., :-4], 1, {"padding": 4, "dilation": 2}, ["constant_pad_nd", "conv1d", "relu"]),
    "the other end": (lambda y: y[..., 2:], 1, {}, ["constant_pad_nd", "conv1d", "relu"]),
    "a part of the padding": (lambda y: y[..., :-1], 1, {}, ["constant_pad_nd", "conv1d", "relu"]),
    "both ends": (lambda y: y[..., 1:-1], 1, {}, ["conv1d", "relu"]),
    "counted from the end": (lambda y: y[..., -9:], 1, {}, ["constant_pad_nd", "conv1d", "relu"]),
    "rows": (lambda y: y[:, :, :-2], 2, {}, ["constant_pad_nd", "conv2d", "relu"]),
    "columns": (lambda y: y[..., 1:], 2, {"padding": (0, 1)}, ["constant_pad_nd", "conv2d", "relu"]),
    "depth": (lambda y: y[:, :, 1:], 3, {}, ["constant_pad_nd", "conv3d", "relu"]),
}


@pytest.mark.parametrize("name", CHOMPS)
def test_a_convolution_pads_what_is_left(name: str) -> None:
    cut, rank, options, expected = CHOMPS[name]
    assert dropped(Cutting(cut, rank, **options), rank) == (1, expected)


def test_what_is_cut_off_two_axes_is_one_padding() -> None:
    found = dropped(Cutting(lambda y: y[:, :, :-2, 1:].sin(), 2, padding=(2, 3)), 2)
    assert found == (2, ["constant_pad_nd", "conv2d", "sin", "relu"])


STAYS: dict[str, tuple[Cut, dict[str, Any]]] = {
    "more than was padded": (lambda y: y[..., :-3], {}),
    "no padding": (lambda y: y[..., :-2], {"padding": 0}),
    "every second": (lambda y: y[..., :-2:2], {}),
    "a stride": (lambda y: y[..., :-1], {"stride": 2}),
    "channels": (lambda y: y[:, 1:], {}),
    "both parts are read": (lambda y: y[..., :2] + y[..., -2:], {}),
}


@pytest.mark.parametrize("name", STAYS)
def test_another_slice_stays(name: str) -> None:
    cut, options = STAYS[name]
    assert dropped(Cutting(cut, **options))[0] == 0


class Temporal(nn.Module):
    """Two residual blocks of a temporal convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.ModuleList(), nn.Linear(16, 3)
        for i, dilation in enumerate((1, 2)):
            width = 4 if i == 0 else 16
            options: dict[str, Any] = {"dilation": dilation, "padding": 2 * dilation}
            convs = [nn.Conv1d(n, 16, 3, **options) for n in (width, 16)]
            self.first.append(nn.ModuleList([*convs, nn.Conv1d(width, 16, 1)]))

    def forward(self, x: Tensor) -> Tensor:
        for one, two, skip in self.first:  # type: ignore[misc]
            y = F.relu(one(x)[:, :, : -one.padding[0]].contiguous())
            x = F.relu(F.relu(two(y)[:, :, : -two.padding[0]]) + skip(x))
        result: Tensor = self.last(x[:, :, -1])
        return result


def test_a_temporal_network_is_integer_throughout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, 20)
    form = quantize(Temporal().eval(), QuantizeConfig(), example=x, calibration=[x])
    assert form.plan.float_units == ()
    assert {unit.kind for unit in form.plan.units} == {"conv", "add", "linear"}
    gates = {
        gate["name"]: gate["passed"] for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates
    }
    assert gates["coverage"]
    assert gates["unit parity"]
