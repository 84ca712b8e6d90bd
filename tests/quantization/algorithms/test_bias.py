"""Sequential bias correction against its definition: for every layer, run everything before it again."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from hard_nets import form_of, forms, hard_mobilenet, images
from test_walk import Count
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from qtool.errors import QtoolError
from qtool.evaluate import sqnr_db
from qtool.graphs.edits import copied, parameter
from qtool.quantization.algorithms import Declined, Subject
from qtool.quantization.algorithms.bias import add_to_bias, correct_biases, mean_outputs
from qtool.quantization.calibration.calibrate import calibrate
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.engines import pt2e
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QuantizeConfig

BATCHES = [images(24), images(8, seed=1)]


def subject(model: nn.Module, batches: list[Tensor], overrides: dict[str, str] | None = None) -> Subject:
    """A converted graph, its biases still float."""
    graph = form_of(model, batches[0])
    placement = Placement(graph, get_target("ort-cpu"), overrides)
    reference = copied(graph)
    prepared = pt2e.prepare(graph, placement)
    calibrate(prepared, batches)
    return Subject(pt2e.convert(prepared), reference, placement, batches)


class Watch(Interpreter):
    def run_node(self, n: Node):
        result = super().run_node(n)
        if n.name == self.wanted:
            self.seen.append(result)
        return result


def values_of(graph: GraphModule, name: str, batches: list[Tensor]) -> Tensor:
    """What the node of that name gives on all samples, float64, by running the whole graph."""
    watch = Watch(graph)
    watch.wanted, watch.seen = name, []
    with torch.no_grad():
        for batch in batches:
            watch.run(batch)
    return torch.cat([v.double() for v in watch.seen])


def mean_of(graph: GraphModule, name: str, batches: list[Tensor]) -> Tensor:
    """The mean output of each channel of the node of that name."""
    values = values_of(graph, name, batches)
    return values.mean(0) if values.dim() == 2 else values.mean((0, 2, 3))


def biases(graph: GraphModule, names: list[str]) -> dict[str, Tensor]:
    return {n.name: parameter(graph, n.args[2]) for n in graph.graph.nodes if n.name in names}


def test_every_bias_is_what_the_definition_gives() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    naive = copy.deepcopy(given.graph)
    pairs = {node.name: other.name for node, other in given.anchors().items()}
    assert len(pairs) == 12
    for node in list(naive.graph.nodes):
        if node.name in pairs:
            change = mean_of(given.reference, pairs[node.name], BATCHES) - mean_of(naive, node.name, BATCHES)
            add_to_bias(naive, node, change)
            naive.recompile()
    correct_biases(given)
    expected = biases(naive, list(pairs))
    for name, found in biases(given.graph, list(pairs)).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4 * float(expected[name].abs().max()))
    for name, other in pairs.items():
        wanted, got = mean_of(given.reference, other, BATCHES), mean_of(given.graph, name, BATCHES)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    assert given.notes == ["bias: corrected in 12 layers"]


@pytest.mark.parametrize("engine", ["pt2e", "torch.ao"])
def test_the_output_comes_much_nearer_to_float_on_a_hard_net(engine: str) -> None:
    model, test = hard_mobilenet(), images(128, seed=9)
    found = {}
    for algorithms in (None, ("bias",)):
        config = QuantizeConfig(engine=engine, algorithms=algorithms)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms(model))
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
        assert ("bias: corrected in 12 layers" in quantized.plan.notes) == (algorithms is not None)
    assert found["bias",] > found[None] + 3


def test_it_costs_one_pass_of_each_graph_and_a_sample_per_batch_and_layer() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    with Count() as once:
        for batch in BATCHES:
            given.reference(batch)
    with Count() as counted:
        correct_biases(given)
    assert counted.samples == 2 * once.samples + 11 * len(BATCHES)  # the linear layer is no convolution


def test_some_samples_of_every_batch_do_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("qtool.quantization.algorithms.bias"), "SAMPLES", 16)
    few, all_of_them = subject(hard_mobilenet(), BATCHES), subject(hard_mobilenet(), [BATCHES[0][:12], BATCHES[1][:4]])
    all_of_them.graph = copy.deepcopy(few.graph)
    for given in (few, all_of_them):
        correct_biases(given)
    test = images(8, seed=5)
    assert torch.equal(few.graph(test), all_of_them.graph(test))


def test_it_declines_without_samples() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    given.batches = []
    with pytest.raises(Declined, match="no calibration samples"):
        correct_biases(given)


def test_batches_count_by_their_samples() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    graph = float_form(model, images(2))
    node = next(n for n in graph.graph.nodes if "conv2d" in n.name)
    whole = mean_outputs(graph, [node], [images(32)])[node]
    parts = mean_outputs(graph, [node], list(images(32).split([1, 24, 7])))[node]
    torch.testing.assert_close(parts, whole)


class Twice(nn.Module):
    """One module used twice, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).relu())


def test_a_shared_layer_without_a_bias_gets_one_for_each_use() -> None:
    given = subject(Twice(), BATCHES)
    correct_biases(given)
    found = [parameter(given.graph, node.args[2]) for node in given.anchors()]
    assert len(found) == 2
    assert not torch.equal(*found)


def test_layers_left_in_float_are_not_touched() -> None:
    given = subject(hard_mobilenet(), BATCHES, {"blocks.1.*": "float"})
    correct_biases(given)
    assert given.notes == ["bias: corrected in 9 layers"]


def test_nothing_integer_is_declined() -> None:
    graph = float_form(nn.Linear(3, 3), torch.randn(2, 3))
    placement = Placement(graph, get_target("ort-cpu"), {"*": "float"})
    with pytest.raises(Declined, match="no convolution"):
        correct_biases(Subject(graph, graph, placement, [torch.randn(2, 3)]))


@pytest.mark.parametrize("algorithm", ["bias", "gptq", "renorm"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_samples_that_are_not_finite_are_told_where_no_range_is_read(algorithm: str, value: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(8, 4)
    x[3, 2] = value
    config = QuantizeConfig(weights_only=True, ranges="minmax", algorithms=(algorithm,))
    with pytest.raises(QtoolError, match=r"layer '0': expected finite outputs .* got NaN or infinity"):
        quantize(model, config, example=x, calibration=[x])
