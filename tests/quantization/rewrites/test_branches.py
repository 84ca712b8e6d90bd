from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.branches import merge_branches
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

Write = Callable[["Branches", Tensor], Tensor]


class Branches(nn.Module):
    """Layers of one input; ``write`` says how they are added up."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.wide, self.small = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.row = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))
        self.halved, self.halved_small = nn.Conv2d(4, 8, 5, 2, 2, bias=False), nn.Conv2d(4, 8, 1, 2)
        self.grouped, self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 4, 1, groups=4)
        self.spread = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.even = nn.Conv2d(4, 4, 2, padding=1, dilation=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


def rep_vgg(m: Branches, x: Tensor) -> Tensor:
    return (m.norms[0](m.wide(x)) + m.norms[1](m.small(x)) + m.norms[2](x)).relu()


MERGED: dict[str, tuple[Write, int]] = {
    "RepVGG": (rep_vgg, 0),
    "in other order": (lambda m, x: m.norms[2](x) + (m.small(x) + m.wide(x)), 0),
    "a difference": (lambda m, x: m.norms[2](x) - m.wide(x), 0),
    "a difference of branches": (lambda m, x: x + (m.small(x) - m.wide(x) - m.norms[0](x)), 1),
    "a row": (lambda m, x: m.row(x) + m.wide(x), 0),
    "with a stride": (lambda m, x: m.halved_small(x) + m.halved(x), 0),
    "in groups": (lambda m, x: m.grouped(x) + m.norms[0](x), 0),
    "with a dilation": (lambda m, x: m.spread(x) + m.norms[0](x), 0),
    "the input, normalised": (lambda m, x: m.norms[3](m.wide(x) + m.small(x) + x), 0),
}


@pytest.mark.parametrize("name", MERGED)
def test_branches_are_one_convolution(name: str) -> None:
    torch.manual_seed(0)
    write, sums = MERGED[name]
    model, x = Branches(write).eval(), torch.randn(2, 4, 7, 7)
    graph = float_form(model, x, merged=False)
    (_,) = merge_branches(graph)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(aten.conv2d.default) == 1
    assert targets.count(aten.add.Tensor) == sums
    assert aten.batch_norm.default not in targets
    for batch in (x, x[:1]):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-5, atol=1e-5)


LEFT: dict[str, Write] = {
    "a residual connection": lambda m, x: x + m.wide(x),
    "of two inputs": lambda m, x: m.wide(x) + m.small(x.relu()),
    "a branch that is read twice": lambda m, x: (y := m.small(x)) + m.wide(x) * y,
    "of two strides": lambda m, x: m.halved(x) + m.halved_small(x.repeat(1, 1, 1, 1)),
    "other groups": lambda m, x: m.wide(x) + m.grouped(x),
    "another dilation": lambda m, x: m.wide(x) + m.spread(x),
    "a kernel without a centre": lambda m, x: m.even(x) + m.norms[0](x),
    "a scaled sum": lambda m, x: torch.add(m.wide(x), m.small(x), alpha=2),
    "the same twice": lambda m, x: (y := m.wide(x)) + y,
    "shared weights": lambda m, x: m.wide(x) + m.small(x) + m.wide(x.relu()) + m.small(x.relu()),
    "batch-norm where a stride is": lambda m, x: m.halved(x)[:, :4] + m.norms[0](x)[..., ::2, ::2],
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_one_convolution_stays(name: str) -> None:
    torch.manual_seed(0)
    model, x = Branches(LEFT[name]).eval(), torch.randn(2, 4, 7, 7)
    graph = float_form(model, x, merged=False)
    assert not merge_branches(graph)
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize(("engine", "units"), [("pt2e", 3), ("torch.ao", 7)])
def test_the_plan_and_the_float_reference_have_one_layer(engine: str, units: int) -> None:
    torch.manual_seed(0)

    class RepVGG(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.small = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.wide(x) + self.small(x) + self.norm(x))

    net, x = nn.Sequential(nn.Conv2d(4, 4, 1), RepVGG(), nn.Conv2d(4, 4, 1)).eval(), torch.randn(4, 4, 7, 7)
    made = quantize(net, QuantizeConfig(engine=engine), example=x, calibration=[x])
    assert [unit.integer for unit in made.plan.units] == [True] * units
    assert made.float_graph is not None
    convolutions = [node for node in made.float_graph.graph.nodes if node.target is aten.conv2d.default]
    assert len(convolutions) == (3 if engine == "pt2e" else 4)
    error = (made(x) - net(x)).square().mean() / net(x).square().mean()
    assert error < 1e-3


def test_training_goes_on_with_the_branches_merged() -> None:
    torch.manual_seed(0)
    model, x = Branches(lambda m, x: m.norms[3](m.row(rep_vgg(m, x)))).eval(), torch.randn(2, 4, 7, 7)
    graph = capture(model, x, train=True)
    (whole,) = merge_branches(graph, train=True)
    norms = [node for node in graph.graph.nodes if node.target is aten.batch_norm.default]
    assert len(norms) == 1
    norms[0].update_arg(5, False)
    graph.recompile()
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)
    assert all(graph.get_parameter(str(value.target)).requires_grad for value in whole.args[1:3])
