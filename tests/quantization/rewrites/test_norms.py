"""Batch-norm folded, convolved and kept live, each against the modules it came from, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.graphs.edits import copied, owner, set_training
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.engines import pt2e
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import fold_batch_norm, is_live, make_live, settle_live, write_norms
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU
from qtool.recipe import QuantizeConfig

CONV2D = (2, 6, 9, 9)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in evaluation mode with statistics, scales and shifts that a mistake would show in."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.uniform_(-2, 2, generator=generator)
                module.running_var.uniform_(0.2, 3, generator=generator)
                if module.affine:
                    module.weight.uniform_(-1.5, 1.5, generator=generator)
                    module.bias.uniform_(-1, 1, generator=generator)
    return model.eval()


def norms_of(graph: GraphModule) -> int:
    return sum(node.target is aten.batch_norm.default for node in graph.graph.nodes)


def distance(model: nn.Module, graph: GraphModule, *inputs: Tensor) -> float:
    """The greatest difference between the model in float64 and the graph, relative to the greatest output."""
    with torch.no_grad():
        got = graph(*inputs).double()
        expected = model.double()(*(x.double() for x in inputs))
    model.float()
    return float((expected - got).abs().max() / expected.abs().max())


class RowNorm(nn.Module):
    """A linear layer on tokens whose batch-norm takes batch × tokens for its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


FOLDABLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear on tokens": (RowNorm, (2, 4, 6)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)), CONV2D),
    "conv without bias": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)), CONV2D),
    "conv, norm not affine": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, affine=False)), CONV2D),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, groups=2), nn.BatchNorm2d(8)), CONV2D),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(6, 12, 3, groups=6, stride=2), nn.BatchNorm2d(12)), CONV2D),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8)), (2, 6, 9)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(6, 4, 2), nn.BatchNorm3d(4)), (2, 6, 4, 4, 4)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 8, 3, 2), nn.BatchNorm2d(8)), CONV2D),
    "grouped transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 9, 3, groups=3), nn.BatchNorm2d(9)), CONV2D),
    "transposed1d": (lambda: nn.Sequential(nn.ConvTranspose1d(6, 8, 3, groups=2), nn.BatchNorm1d(8)), (2, 6, 9)),
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)), (5, 6)),
    "two norms": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)), CONV2D),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_folding_changes_nothing_but_the_graph(name: str) -> None:
    build, shape = FOLDABLE[name]
    model, x = randomised(build()), torch.randn(shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    graph = capture(model, x)
    folded = fold_batch_norm(graph)
    assert len(folded) == (2 if name == "two norms" else 1)
    assert norms_of(graph) == 0
    assert distance(model, graph, x) < 2e-6
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_norm_over_tokens_is_not_taken_for_one_over_features() -> None:
    model = randomised(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))
    x = torch.randn(2, 5, 6)
    graph = capture(model, x)
    assert fold_batch_norm(graph) == []
    write_norms(graph)
    assert norms_of(graph) == 0
    assert distance(model, graph, x) < 2e-6


class Shared(nn.Module):
    """One convolution applied three times: twice under one batch-norm, once under another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(self.first(self.conv(self.first(self.conv(x))))))


def test_a_weight_under_several_norms_gets_a_copy_for_each_norm() -> None:
    model, x = randomised(Shared()), torch.randn(2, 4, 6, 6)
    graph = capture(model, x)
    assert len(fold_batch_norm(graph)) == 3
    assert distance(model, graph, x) < 2e-6
    weights = [node.args[1].target for node in graph.graph.nodes if node.target is aten.conv2d.default]
    assert weights[0] == weights[1] != weights[2]
    assert len(list(graph.parameters())) == 4  # the unfolded weight is gone


def test_a_norm_on_top_of_a_shared_one_gets_a_copy_of_its_own() -> None:
    """Heads that levels share, each level with a batch-norm of its own behind the head's (EfficientDet's)."""

    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = norm(self.head(x)).relu()
            return self.head(x)

    model, x = randomised(Levels()), torch.randn(2, 4, 6, 6)
    graph = capture(model, x)
    assert len(fold_batch_norm(graph)) == 5
    assert distance(model, graph, x) < 2e-6
    weights = [node.args[1].target for node in graph.graph.nodes if node.target is aten.conv2d.default]
    assert len(set(weights)) == 3


def test_a_tied_weight_without_a_norm_keeps_its_own_values() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.normed, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
            self.plain.weight = self.normed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(self.norm(self.normed(x)))

    model, x = randomised(Tied()), torch.randn(2, 4, 5, 5)
    graph = capture(model, x)
    fold_batch_norm(graph)
    assert norms_of(graph) == 0
    assert distance(model, graph, x) < 2e-6


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


def test_a_convolution_with_another_reader_is_not_folded_but_its_norm_is_convolved() -> None:
    model, x = randomised(ReadTwice()), torch.randn(2, 4, 6, 6)
    graph = capture(model, x)
    assert fold_batch_norm(graph) == []
    assert norms_of(graph) == 1
    (made,) = write_norms(graph)
    assert made.target is aten.conv2d.default
    assert made.args[6] == 4  # depthwise
    assert distance(model, graph, x) < 2e-6


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.BatchNorm1d(5), (4, 5)),
        (lambda: nn.BatchNorm1d(5, affine=False), (4, 5, 7)),
        (lambda: nn.BatchNorm2d(5), (4, 5, 6, 7)),
        (lambda: nn.BatchNorm3d(5), (4, 5, 3, 3, 3)),
        (lambda: nn.BatchNorm2d(5, track_running_stats=False), (4, 5, 6, 7)),
        (lambda: nn.BatchNorm2d(5, track_running_stats=False, affine=False), (4, 5, 6, 7)),
    ],
)
def test_a_norm_of_its_own_becomes_other_operators(norm: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = randomised(nn.Sequential(norm())), torch.randn(shape)
    graph = capture(model, x)
    write_norms(graph)
    assert norms_of(graph) == 0
    assert distance(model, graph, x) < 2e-6


def _seen(node: torch.fx.Node, value: Any) -> Any:
    """A computed value, whose rank and fixed sizes are those that its node tells."""
    if node.op == "call_function":
        told = node.meta["val"].shape
        assert len(told) == value.dim()
        assert all(size == fixed for size, fixed in zip(value.shape, told, strict=True) if isinstance(fixed, int))
    return value


def test_a_norm_over_the_batch_alone_is_known_by_its_module_and_quantized_beside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()).eval()
    x = torch.randn(8, 3, 6, 6)
    graph = capture(model, x)
    write_norms(graph)
    spelled = [node for node in graph.graph.nodes if node.op == "call_function" and owner(node) == "1"]
    assert len(spelled) == 11
    watch = torch.fx.Interpreter(graph)
    watch.run_node = lambda node: _seen(node, torch.fx.Interpreter.run_node(watch, node))  # type: ignore[method-assign]
    with torch.no_grad():
        watch.run(x)
    quantized = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    torch.testing.assert_close(quantized(x), model(x), rtol=0, atol=0.1)


def trained() -> nn.Module:
    model = randomised(Trained())
    with torch.no_grad():
        model.a[1].weight[2] = 0
    return model


def live_and_plain(model: nn.Module, x: Tensor) -> tuple[GraphModule, GraphModule]:
    """The model's training graph with live batch-norm, without quantizers, and the same graph untouched."""
    plain = capture(model, x, train=True)
    live = copied(plain)
    make_live(live, [placed.nodes for placed in Placement(live, ORT_CPU).placed if placed.pattern is not None])
    return live, plain


class Trained(nn.Module):
    """A convolution with a bias, a depthwise one without, a linear layer, each with a batch-norm; one γ is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4, affine=False))
        self.c = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).mean((2, 3)))


def test_a_live_norm_trains_as_the_plain_one_does_gradients_and_statistics_included() -> None:
    torch.manual_seed(0)
    live, plain = live_and_plain(trained(), torch.randn(4, 3, 8, 8))
    assert sum(node.target is aten.div.Tensor for node in live.graph.nodes) == 3
    for step in range(3):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        outputs = [graph(x) for graph in (live, plain)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        for output in outputs:
            output.square().sum().backward()
    gradients = {name: value.grad for name, value in plain.named_parameters()}
    for name, value in live.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], rtol=1e-3, atol=1e-3, msg=name)
    statistics = dict(plain.named_buffers())
    for name, value in live.named_buffers():
        torch.testing.assert_close(value, statistics[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_live_norm_keeps_no_more_activations_than_the_plain_one() -> None:
    live, plain = live_and_plain(trained(), torch.randn(4, 3, 32, 32))
    kept = []
    for graph in (live, plain):
        sizes: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda value, sizes=sizes: (sizes.setdefault(value.data_ptr(), value.numel()), value)[1],
            lambda value: value,
        ):
            output = graph(torch.randn(4, 3, 32, 32))
        kept.append(sorted(size for size in sizes.values() if size > 1000))
        output.sum().backward()
    assert kept[0] == kept[1]
    assert kept[0]


def test_settling_a_live_norm_is_folding_the_plain_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    live, plain = live_and_plain(trained(), x)
    for graph in (live, plain):
        set_training(graph, batch_norm=False, dropout=False)
    expected = plain(x)
    torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-5)
    assert bool(torch.isfinite(live(x)).all())
    settle_live(live)
    assert norms_of(live) == 0
    assert not any(node.target in (aten.div.Tensor, aten.sqrt.default) for node in live.graph.nodes)
    torch.testing.assert_close(live(x), expected, rtol=1e-4, atol=1e-5)


def test_what_was_trained_through_fake_quantizers_is_what_is_converted() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    graph = capture(trained(), x, train=True)
    prepared = pt2e.prepare(graph, Placement(graph, ORT_CPU), train=True)
    set_training(prepared, batch_norm=False, dropout=False)
    prepared(x)
    for fake in pt2e.fake_quantizers(prepared):
        fake.observing = False
    expected = prepared(x)
    converted = pt2e.convert(prepared)
    torch.testing.assert_close(converted(x), expected, rtol=1e-5, atol=1e-6)


def test_a_division_of_the_users_own_is_not_taken_for_a_live_norm() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.scale = (
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4),
                nn.Parameter(torch.full((4, 1, 1), 2.0)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x) / self.scale)

    model, x = randomised(Divided()), torch.randn(2, 3, 6, 6)
    graph = capture(model, x)
    settle_live(graph)
    assert distance(model, graph, x) < 2e-6


def test_a_weight_that_the_user_divides_is_not_taken_for_a_live_one() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.full((4, 1, 1, 1), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, self.weight / self.scale)

    graph = capture(Divided(), torch.randn(2, 3, 6, 6), train=True)
    assert [is_live(node) for node in graph.graph.nodes if node.target is aten.conv2d.default] == [False]
    live, _ = live_and_plain(trained(), torch.randn(2, 3, 8, 8))
    assert [is_live(node) for node in live.graph.nodes if node.target is aten.conv2d.default] == [True, True]


@settings(max_examples=12, derandomize=True, database=None)
@given(
    groups=st.sampled_from([1, 2, 3]), per_group=st.integers(1, 3), outputs=st.integers(1, 3), bias=st.booleans(),
    transposed=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_folding_holds_for_any_grouping(
    groups: int, per_group: int, outputs: int, bias: bool, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    conv = kind(groups * per_group, groups * outputs, 2, groups=groups, bias=bias)
    model = randomised(nn.Sequential(conv, nn.BatchNorm2d(groups * outputs)), seed)
    x = torch.randn(2, groups * per_group, 4, 4)
    graph = capture(model, x)
    fold_batch_norm(graph)
    assert distance(model, graph, x) < 2e-6
