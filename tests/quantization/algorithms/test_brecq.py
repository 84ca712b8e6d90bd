"""Block reconstruction: where blocks begin and end, what is dropped, and that what it makes is nearer."""

from __future__ import annotations

import pytest
import torch
from hard_nets import hard_mobilenet, images
from test_adaround import BATCHES, learned, subject
from torch import Tensor, nn

from qtool.graphs.edits import parameter
from qtool.quantization.algorithms import reconstruct, regions
from qtool.quantization.algorithms.brecq import DROP, brecq
from qtool.quantization.algorithms.importance import importance
from qtool.quantization.algorithms.part import Part
from qtool.quantization.algorithms.regions import Region, blocks, counterparts, units
from qtool.quantization.algorithms.walk import cut
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


class Residual(nn.Module):
    """A stem, a block with a convolution on both sides, and a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.left, self.again, self.down = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.again(self.left(x).relu()) + self.down(x)).relu()
        return self.head(x.mean((2, 3)))


def names(found: list[Region]) -> list[list[str]]:
    return [[str(layer.meta["unit"]) for layer in region.layers] for region in found if region.layers]


def test_a_block_is_what_lies_between_two_values_that_everything_passes() -> None:
    given = subject(Residual().eval(), [images(8)])
    segments = cut(given.graph)
    found, large = blocks(segments, given.anchors())
    assert names(found) == [["stem"], ["left", "again", "down"], ["head"]]
    assert not large
    assert [s for region in found for s in region.segments] == segments
    assert names(units(segments, given.anchors())) == [["stem"], ["left"], ["again"], ["down"], ["head"]]
    block = next(region for region in found if len(region.layers) == 3)
    assert len(block.reads) == 1
    assert "relu" in block.output.name
    assert counterparts(given, [block.output])[block.output].name == block.output.name


def test_a_block_of_too_many_layers_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MOST", 2)
    given = subject(Residual().eval(), [images(8)], steps=2)
    brecq(given)
    assert given.notes[0].startswith("brecq: more than 12 layers in a block, taken one by one: left … down")
    assert "of 5 regions" in given.notes[1]


def test_where_weights_alone_are_quantized_layers_are_still_learned_one_by_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)).eval()
    test, error = images(64, seed=9), {}
    for name, expected in (("adaround", 3), ("brecq", 3), (None, 0)):
        options = {"algorithms": (name,)} if name else {}
        config = QuantizeConfig(weights_only=True, weight_bits=4, rounding_steps=40, **options)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES)
        assert not name or f"of {expected} regions" in quantized.plan.notes[-1] + quantized.plan.notes[0]
        with torch.no_grad():
            error[name] = float((quantized(test) - model(test)).square().mean())
    assert max(error["adaround"], error["brecq"]) < 0.8 * error[None]


def test_half_of_the_quantized_values_are_left_in_float() -> None:
    part = Part(None, {}, None, None, [], 1, DROP)  # type: ignore[arg-type]
    rounded, value = torch.zeros(10_000), torch.ones(10_000)
    share = float(part._dropped(rounded, value, torch.Generator().manual_seed(0)).mean())
    assert share == pytest.approx(0.5, abs=0.03)


def test_what_a_region_computes_is_what_the_graph_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error before learning, from the region alone, is that of the whole quantized graph's own output."""
    given = subject(Residual().eval(), BATCHES)
    seen: dict[str, float] = {}

    def measure(self: reconstruct._Learner, region: Region, goal: dict, number: int) -> dict[str, Tensor]:
        for other in goal.values():
            self.beside.reach(other)
        seen[region.name] = float(Part(region, goal, self.walk, self.beside.walk, self.sizes, 1).held_errors({}).sum())
        return {"kept": torch.ones(1)}

    monkeypatch.setattr(reconstruct._Learner, "learn", measure)
    brecq(given)
    together = torch.cat(BATCHES)
    with torch.no_grad():
        gap = given.graph(together) - given.reference(together)
    held = gap[7::8].double().square().sum()
    assert seen["head"] == pytest.approx(float(held), rel=1e-4)


def test_importance_is_the_mean_squared_derivative_of_the_outputs() -> None:
    torch.manual_seed(0)
    graph = float_form(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(2, 3))
    node = next(n for n in graph.graph.nodes if "tanh" in n.name)
    last = next(n for n in graph.graph.nodes if n.name == "linear_1")
    batches = [torch.randn(128, 3) for _ in range(3)]
    found = importance(graph, {node: -1}, batches)[node]
    weight = parameter(graph, last.args[1])
    torch.testing.assert_close(found, weight.square().sum(0), rtol=0.25, atol=0.01)


def test_learning_blocks_comes_nearer_than_rounding_to_nearest_and_draws_by_seed() -> None:
    test, model = images(64, seed=9), hard_mobilenet()
    first, second = (subject(model, BATCHES, steps=10) for _ in range(2))

    def error() -> float:
        with torch.no_grad():
            return float((first.graph(test) - first.reference(test)).square().mean())

    before = error()
    for given in (first, second):
        brecq(given)
    assert error() < 0.5 * before
    assert all(torch.equal(value, learned(second)[name]) for name, value in learned(first).items())
