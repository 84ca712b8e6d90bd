"""What norms of groups read has even groups around 0, which changes nothing but what rounding does to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.form import QuantizedModel
from qtool.graphs.operators import aten
from qtool.quantization.algorithms.equalize import equalize
from qtool.quantization.algorithms.subject import NothingToDo, Subject
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


def net(groups: int = 8) -> nn.Sequential:
    """Two convolutions before norms, of channels whose sizes are up to e² apart, and far from 0."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
    with torch.no_grad():
        first.weight.mul_(torch.linspace(0, 2, 8).exp().reshape(-1, 1, 1, 1))
        first.bias += torch.linspace(-4, 4, 8)
    norms = [
        nn.InstanceNorm2d(8, affine=affine) if groups == 8 else nn.GroupNorm(groups, 8) for affine in (True, False)
    ]
    return nn.Sequential(first, norms[0], nn.LeakyReLU(), second, norms[1], nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))


def images(seed: int = 0) -> Tensor:
    return torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def subject_of(model: nn.Module, x: Tensor) -> Subject:
    graph = float_form(model.eval(), x[:2])
    return Subject(graph, graph, Placement(graph, ORT_CPU), [x])


def convolved(graph: torch.fx.GraphModule, x: Tensor) -> list[Tensor]:
    """What convolutions give."""
    kept = []

    class Kept(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if n.target is aten.conv2d.default:
                kept.append(value)
            return value

    Kept(graph).run(x)
    return kept


@pytest.mark.parametrize("groups", [8, 4, 2])
def test_groups_are_as_wide_as_the_widest_and_results_are_the_same(groups: int) -> None:
    x, model = images(), net(groups)
    subject = subject_of(model, x)
    equalize(subject)
    for value in convolved(subject.graph, x):
        parts = value.detach().reshape(len(x), groups, -1)
        torch.testing.assert_close(parts.abs().amax((0, 2)), parts.abs().amax().expand(groups), atol=0, rtol=1e-4)
        torch.testing.assert_close(parts.mean((0, 2)), torch.zeros(groups), atol=1e-4, rtol=0)
    torch.testing.assert_close(subject.graph(images(1)), model(images(1)), atol=2e-3, rtol=0)
    assert "equalize: channels made as wide as the widest in front of 2 norms" in subject.notes


@torch.no_grad()
def sqnr_db(model: nn.Module, form: QuantizedModel) -> float:
    x = images(1)
    error = form(x) - model(x)
    return float(10 * torch.log10(model(x).square().sum() / error.square().sum()))


def test_rounding_costs_less_and_saved_ranges_repeat_it(tmp_path: Path) -> None:
    model, x = net().eval(), [images()]
    evened = qtool.quantize(model, x, algorithms=("equalize",))
    assert sqnr_db(model, evened) > sqnr_db(model, qtool.quantize(model, x, algorithms=None)) + 4
    (tmp_path / "ranges.json").write_text(json.dumps(evened.ranges))
    again = qtool.quantize(model, x, algorithms=("equalize",), ranges_from=tmp_path / "ranges.json")
    assert torch.equal(again(images(1)), evened(images(1)))


def test_channels_that_hardly_vary_keep_their_size() -> None:
    """Of them ε is most of what the norm divides by."""
    model, x = net(), images()
    with torch.no_grad():
        model[0].weight[3] *= 1e-4
    subject = subject_of(model, x)
    equalize(subject)
    scales = torch.tensor(subject.ranges["conv2d"]["equalize"]["scales"])
    assert scales[3] == 1
    assert scales[0] > 4
    torch.testing.assert_close(subject.graph(images(1)), model(images(1)), atol=2e-3, rtol=0)


def test_a_norm_of_all_channels_is_fit_by_one_range() -> None:
    with pytest.raises(NothingToDo):
        equalize(subject_of(net(1), images()))
