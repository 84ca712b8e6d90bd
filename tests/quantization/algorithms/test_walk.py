"""The walk: the same values as running the graph, each layer run once, nothing kept too long."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from conv_nets import build, example, nets
from hard_nets import hard_mobilenet, images
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qtool.errors import QtoolError
from qtool.nested import call, tensors
from qtool.quantization.algorithms.walk import Walk, cut
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


def walked(graph: torch.fx.GraphModule, batches: list, budget: int = 2**30) -> list:
    with Walk(graph, batches, budget=budget) as walk:
        for segment in walk.segments:
            walk.advance(segment)
        return list(walk.output())


@functools.cache
def hard_graph() -> torch.fx.GraphModule:
    return quantize(hard_mobilenet(), QuantizeConfig(), example=images(2), calibration=[images(7)]).graph


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(nets(most=3))
def test_a_walk_through_any_quantized_net_gives_what_running_it_gives(net) -> None:
    model = build(net)
    batches = [example(net, 4, 0), example(net, 3, 1)]
    graph = quantize(model, QuantizeConfig(), example=example(net, 2), calibration=batches).graph
    for found, batch in zip(walked(graph, batches), batches, strict=True):
        for a, b in zip(tensors(found), tensors(call(graph, batch)), strict=True):
            assert torch.equal(a, b)


def test_a_budget_of_nothing_spools_every_value_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batches = [images(4), images(3, seed=1)]
    graph = hard_graph()
    with Walk(graph, batches, budget=0) as walk:
        for segment in walk.segments:
            walk.advance(segment)
            assert list(tmp_path.rglob("*.pt"))
        for found, batch in zip(walk.output(), batches, strict=True):
            assert torch.equal(next(tensors(found)), graph(batch))
    assert not list(tmp_path.iterdir())


class Count(TorchDispatchMode):
    """Counts samples that go through convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in str(func):
            self.samples += len(args[0])
        return func(*args, **(kwargs or {}))


def test_each_layer_runs_once_and_what_nothing_reads_is_dropped() -> None:
    batches = [images(4), images(4, seed=1)]
    graph = hard_graph()
    with Count() as once:
        for batch in batches:
            graph(batch)
    with Count() as counted, Walk(graph, batches) as walk:
        for segment in walk.segments:
            walk.advance(segment)
            assert len(walk._store._memory) <= 3  # a block's input, its layer's input and output
    assert counted.samples == once.samples


def test_what_is_held_stays_until_it_is_released() -> None:
    batches = [images(4)]
    graph = hard_graph()
    first, second, *_ = [segment.output for segment in cut(graph)]
    with Walk(graph, batches, held=[first, second]) as walk:
        for segment in walk.segments:
            walk.advance(segment)
        kept = len(walk._store._memory)
        assert [len(list(walk.held(node))) for node in (first, second)] == [1, 1]
        walk.release(first)
        assert len(walk._store._memory) == kept - 1
        with pytest.raises(KeyError):
            walk.stored(first, 0)
        walk.stored(second, 0)


def test_the_cut_is_at_quantizers() -> None:
    graph = hard_graph()
    targets = [str(segment.output.target) for segment in cut(graph)]
    assert targets[-1] == "aten.linear.default"
    assert all("quantize_per_tensor" in name for name in targets[:-1])


def test_means_are_those_of_the_values() -> None:
    batches = [images(5), images(300, 8, seed=1)[:, :, :8, :8]]
    graph = hard_graph()
    with Walk(graph, batches) as walk:
        for segment in walk.segments:
            for node in segment.nodes[:-1]:
                for value, (mean, count) in zip(walk.values(segment, node), walk.means(segment, node), strict=True):
                    torch.testing.assert_close(mean, value.mean(0, keepdim=True))
                    assert count == len(value)
            walk.advance(segment)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        both = self.first(left) - self.second(right)
        return {"sum": both.relu(), "same": both}


def test_inputs_by_name_in_any_order_and_results_in_a_dict() -> None:
    batch = {"left": torch.randn(4, 3), "right": torch.randn(4, 5)}
    graph = float_form(Two(), batch)
    swapped = {"right": batch["right"], "left": batch["left"]}
    (found,) = walked(graph, [swapped])
    expected = graph(**batch)
    for a, b in zip(tensors(found), (expected["sum"], expected["same"]), strict=True):
        assert torch.equal(a, b)


def test_a_graph_without_quantizers_walks_too() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), images(2))
    assert torch.equal(next(tensors(walked(graph, [images(2)]))), graph(images(2)))


def test_no_batch_is_an_error() -> None:
    graph = float_form(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(QtoolError, match="at least one sample"):
        Walk(graph, [])


class Runs(TorchDispatchMode):
    """Counts the convolutions that are run, also while a graph is captured, where samples have no number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithms", [("bias",), ("gptq",)], ids=str)
def test_each_layer_of_a_chain_without_quantizers_costs_as_much_as_those_before(algorithms: tuple[str, ...]) -> None:
    counts = []
    for depth in (3, 6, 9):
        layers = [layer for _ in range(depth) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())]
        config = QuantizeConfig(weights_only=True, algorithms=algorithms)
        with Runs() as run:
            quantize(nn.Sequential(*layers), config, example=images(2), calibration=[images(2)])
        counts.append(run.count)
    assert counts[1] - counts[0] == counts[2] - counts[1]
