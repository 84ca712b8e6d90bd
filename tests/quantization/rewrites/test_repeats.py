from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.repeats import merge_repeats


class Attention(nn.Module):
    """What most transformers are made of: three layers over one input, and one layer over it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(F.relu(x)), self.value(F.relu(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return torch.as_tensor(self.last(mixed) + self.last(mixed) * 0.5)


def _count(graph: torch.fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


def test_a_call_that_repeats_another_is_gone_and_the_result_is_the_same() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(3, 5, 8)
    graph = capture(model, x)
    assert _count(graph, aten.relu.default) == 1
    assert _count(graph, aten.linear.default) == 4
    torch.testing.assert_close(graph(x), model(x))


class Masked(nn.Module):
    """Blocks with a mask and a batch-norm each, whose statistics begin the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.ones(5, 5).tril() > 0)
        self.register_buffer("number", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.norm(x), x, x, self.mask) * self.number


def test_buffers_that_hold_the_same_are_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Masked() for _ in range(3))).eval(), torch.randn(4, 5, 8)
    model[2].mask[3, 1] = False
    graph = capture(model, x)
    kept = Counter(name.rpartition(".")[2] for name, _ in graph.named_buffers())
    assert kept == {"mask": 2, "number": 1, "running_mean": 3, "running_var": 3}
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)


def test_pools_with_a_stride_and_without_are_one() -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            most = F.max_pool2d(x, 2), nn.MaxPool2d(2)(x), F.max_pool2d(x, 2, ceil_mode=True)
            means = F.avg_pool2d(x, 2), F.avg_pool2d(x, 2, 2), F.adaptive_avg_pool2d(x, 4)
            return *most, *means, F.avg_pool2d(x, 2, divisor_override=3)

    x = torch.randn(2, 3, 8, 8)
    graph = capture(Pools(), x)
    assert (_count(graph, aten.max_pool2d.default), _count(graph, aten.avg_pool2d.default)) == (2, 1)
    for got, expected in zip(graph(x), Pools()(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_numbers_of_another_type_or_sign_are_no_repetition() -> None:
    class Divisions(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.div(0.0), x.div(-0.0), x.sum(1, keepdim=True), x.sum(1, keepdim=False), x + 1, x + 1.0

    x = torch.ones(2, 3)
    graph = capture(Divisions(), x)
    assert merge_repeats(graph) == 0
    for got, expected in zip(graph(x), Divisions()(x), strict=True):
        assert torch.equal(got, expected)


def test_what_draws_numbers_is_drawn_each_time() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x, 0.5, self.training) - F.dropout(x, 0.5, self.training)
            return y + torch.rand_like(x) - torch.rand_like(x)

    torch.manual_seed(0)
    graph = capture(Draws(), torch.ones(4, 64), train=True)
    assert _count(graph, aten.dropout.default) == 2
    assert _count(graph, aten.rand_like.default) == 2


def test_one_pass_merges_chains() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    rectified = [graph.call_function(aten.relu.default, (x,)) for _ in range(3)]
    graph.output(tuple(graph.call_function(aten.neg.default, (value,)) for value in rectified))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert merge_repeats(module) == 4
    assert merge_repeats(module) == 0
    first, second, third = module(torch.tensor([-1.0, 2.0]))
    assert first is second is third
