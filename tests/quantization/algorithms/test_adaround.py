"""Learned rounding against trying every rounding, and what becomes of it: undone, gone on from, spooled, declined."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hard_nets import form_of, hard_mobilenet, hard_transformer, images
from torch import Tensor, nn

from qtool.graphs.edits import copied, parameter
from qtool.quantization.algorithms import Declined, Subject, reconstruct
from qtool.quantization.algorithms.adaround import adaround
from qtool.quantization.algorithms.gptq import gptq
from qtool.quantization.algorithms.part import Part, _samples
from qtool.quantization.algorithms.soft import SoftWeight
from qtool.quantization.calibration.calibrate import calibrate
from qtool.quantization.engines import pt2e
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QuantizeConfig

BATCHES = [images(24), images(16, seed=1)]


def subject(model: nn.Module, batches: list[Tensor], steps: int = 60, bits: int = 4, **fields: object) -> Subject:
    """A converted graph, its biases still float."""
    graph = form_of(model, batches[0])
    placement = Placement(graph, get_target("ort-cpu", bits, bits))
    reference = copied(graph)
    prepared = pt2e.prepare(graph, placement)
    calibrate(prepared, batches)
    given = Subject(pt2e.convert(prepared), reference, placement, batches, **fields)  # type: ignore[arg-type]
    given.config = QuantizeConfig(rounding_steps=steps)
    return given


def learned(given: Subject) -> dict[str, Tensor]:
    """Integers and bias of every layer."""
    found = {}
    for node in given.anchors():
        found[f"{node.name}.weight"] = parameter(given.graph, node.args[1].args[0]).clone()
        if len(node.args) > 2:
            found[f"{node.name}.bias"] = parameter(given.graph, node.args[2]).clone()
    return found


def correlated(count: int, size: int) -> Tensor:
    """Inputs of one sign that rise and fall together, so that the errors of weights add up."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, generator=draw).abs() * (1 + 0.2 * torch.rand(count, size, generator=draw))


def test_a_small_layer_is_rounded_nearly_as_well_as_by_trying_every_rounding() -> None:
    torch.manual_seed(0)
    x = correlated(512, 8)
    layer = nn.Linear(8, 4)
    given = subject(layer.eval(), list(x.split(64)), steps=400)
    (node,) = given.anchors()
    stored, quantizer = node.args[1], node.args[0].args[0]
    scale = parameter(given.graph, stored.args[1]).double()
    nearest = parameter(given.graph, stored.args[0]).double()
    seen = torch.fake_quantize_per_tensor_affine(x, *quantizer.args[1:5]).double()
    wanted = layer(x).detach().double() - layer.bias.detach().double()

    def error(integers: Tensor) -> Tensor:
        """Of each output, with the bias that does best."""
        return (seen @ (integers * scale[:, None]).T - wanted).var(0, correction=0)

    floor = (layer.weight.detach().double() / scale[:, None]).floor()
    tried = torch.stack([error(floor + torch.tensor(up)) for up in itertools.product((0.0, 1.0), repeat=8)])
    adaround(given)
    made = error(parameter(given.graph, stored.args[0]).double())
    assert float(tried.min(0).values.sum()) <= float(made.sum()) * (1 + 1e-9)
    assert float(made.sum()) < 1.15 * float(tried.min(0).values.sum())
    assert float(made.sum()) < 0.5 * float(error(nearest).sum())


def test_the_output_behind_an_activation_comes_nearer_than_by_second_order_rounding() -> None:
    torch.manual_seed(0)
    model, mix, errors = nn.Sequential(nn.Linear(24, 32), nn.ReLU()).eval(), torch.randn(24, 24) / 5, {}
    batches, test = list((torch.randn(512, 24) @ mix).split(64)), torch.randn(2048, 24) @ mix
    for run in (gptq, adaround):
        given = subject(model, batches, steps=400)
        run(given)
        with torch.no_grad():
            errors[run] = float((given.graph(test) - model(test)).square().mean())
    assert errors[adaround] < 0.95 * errors[gptq]


def test_what_makes_samples_held_out_worse_is_undone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def scramble(part: object, soft: dict, *_: object) -> None:
        for weight in soft.values():
            weight.shift.data.fill_(100.0)

    fitted = subject(hard_mobilenet(), BATCHES)
    gptq(fitted)
    monkeypatch.setattr(reconstruct, "_minimise", scramble)
    given = subject(hard_mobilenet(), BATCHES)
    adaround(given)
    before = learned(fitted)
    assert all(torch.equal(value, before[name]) for name, value in learned(given).items())
    assert given.notes[0] == "adaround: learned the rounding of 0 of 12 regions"
    assert given.notes[1].startswith("adaround: undone where it made samples held out worse: stem.0, ")


def test_a_channel_that_is_no_better_gets_its_integers_and_bias_back() -> None:
    real, scale = torch.randn(3, 5), torch.tensor([0.25, -0.25, 0.25])
    integers = (real / scale[:, None]).round().clamp(-8, 7)
    soft = SoftWeight(real, integers, scale, 0, (-8, 7), torch.ones(3))
    soft.logits.data.uniform_(-3, 3)
    soft.shift.data.fill_(0.5)
    changed = soft.integers()
    soft.take_back(torch.tensor([False, True, False]))
    assert torch.equal(soft.integers()[1], integers[1])
    assert torch.equal(soft.integers()[[0, 2]], changed[[0, 2]])
    assert soft.shifts().tolist() == [0.5, 0.0, 0.5]


def test_a_soft_weight_starts_as_the_real_one_and_ends_within_a_step_of_it() -> None:
    real, scale = torch.randn(4, 6), torch.tensor([0.5, -0.5, 0.5, -0.5])
    integers = (real / scale[:, None]).round().clamp(-8, 7)
    soft = SoftWeight(real, integers, scale, 0, (-8, 7), torch.ones(4))
    torch.testing.assert_close(soft()[0], real, atol=1e-3, rtol=0)
    soft.logits.data.normal_(std=4.0)
    assert float((soft.integers() * scale[:, None] - real).abs().max()) < 0.5 * (1 + 1e-3)


def test_every_eighth_sample_is_held_out_and_all_others_have_their_turn() -> None:
    made = torch.zeros(5, 3, 20, 24)  # of 480 places, 17 of which are as many as are wanted
    plain, region = SimpleNamespace(stored=lambda node, index: made), SimpleNamespace(output="y")
    part = Part(region, {"y": "float y"}, SimpleNamespace(num_batches=3), plain, [5, 40, 9], 1)  # type: ignore
    first, seen = (0, 5, 45), []
    assert part.minibatch == 17
    for index, rows in itertools.islice(part.minibatches(torch.Generator().manual_seed(0)), 2 * 5):
        assert len(rows) <= 17
        seen += [first[index] + row for row in rows.tolist()]
    assert sorted(seen) == sorted(2 * [place for place in range(54) if place % 8 != 7])


def test_in_the_end_every_weight_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    minimise, left = reconstruct._minimise, []

    def watched(part: Part, soft: dict, *others: object) -> None:
        minimise(part, soft, *others)  # type: ignore[arg-type]
        left.extend(float(weight()[2].detach()) for weight in soft.values())

    monkeypatch.setattr(reconstruct, "_minimise", watched)
    torch.manual_seed(0)
    adaround(subject(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [correlated(64, 8)], 200))
    assert len(left) == 2
    assert max(left) < 0.1  # one that two roundings suit alike may still sway


class Killed(Exception):
    pass


def killed_at(number: int) -> Callable[[str, int, int], None]:
    def report(what: str, done: int, total: int) -> None:
        if done == number:
            raise Killed

    return report


def test_a_run_that_was_killed_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = subject(hard_mobilenet(), BATCHES, steps=10)
    adaround(whole)
    with pytest.raises(Killed):
        adaround(subject(hard_mobilenet(), BATCHES, steps=10, scratch=tmp_path, report=killed_at(8)))
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 16  # eight layers fitted, then learned
    learn, times = reconstruct._Learner.learn, []
    monkeypatch.setattr(reconstruct._Learner, "learn", lambda *a: times.append(a) or learn(*a))
    resumed = subject(hard_mobilenet(), BATCHES, steps=10, scratch=tmp_path)
    adaround(resumed)
    assert len(times) == 4
    assert resumed.notes == whole.notes
    found, expected = learned(resumed), learned(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_layer_inputs_are_spooled_beyond_the_budget_and_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    whole = subject(hard_mobilenet(), BATCHES, steps=4)
    adaround(whole)
    seen: list[int] = []
    monkeypatch.setattr(reconstruct, "Walk", functools.partial(reconstruct.Walk, budget=0))
    report = lambda *_: seen.append(len(list(tmp_path.rglob("*.pt"))))  # noqa: E731
    spooled = subject(hard_mobilenet(), BATCHES, steps=4, report=report)
    adaround(spooled)
    assert 0 < max(seen) <= 10 * len(BATCHES)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, learned(spooled)[name]) for name, value in learned(whole).items())
    with pytest.raises(Killed):
        adaround(subject(hard_mobilenet(), BATCHES, steps=4, report=killed_at(3)))
    assert not list(tmp_path.iterdir())


def test_too_few_samples_to_hold_any_out_is_declined() -> None:
    with pytest.raises(Declined, match="7 calibration samples, and fewer than 8 cannot judge"):
        adaround(subject(hard_mobilenet(), [images(7)]))


def test_a_layer_over_positions_is_learned_on_the_positions_of_some_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(6, 5)).eval(), [torch.randn(16, 4, 6), torch.randn(9, 4, 6)]
    given, found = subject(model, batches), []
    x = batches[1][[7, 2]]

    def watched(part: Part, *_: object) -> None:
        found.append(part.errors({}, 1, torch.tensor([7, 2])))
        given.graph.recompile()
        found.append((given.graph(x) - model(x)).square().sum((0, 1)) / 2)

    monkeypatch.setattr(reconstruct, "_minimise", watched)
    adaround(given)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("size", [1, 2])
def test_batches_of_few_samples_are_learned_from_as_well_as_a_large_one(size: int) -> None:
    torch.manual_seed(0)
    model, x, error = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), correlated(64, 8), {}
    for count in (size, 64):
        given = subject(model, list(x.split(count)))
        adaround(given)
        assert "the rounding of 0 of" not in given.notes[0]
        with torch.no_grad():
            error[count] = float((given.graph(x) - model(x)).square().mean())
    assert error[size] < 1.5 * error[64]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(self.own(x)).relu())


class Price(nn.Module):
    """One number for each sample, from a linear layer or from a convolution."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.head = nn.Linear(12, 1) if linear else nn.Conv1d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)[:, 0] if isinstance(self.head, nn.Linear) else self.head(x[..., None]).flatten(0)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", ["adaround", "brecq"])
def test_one_number_a_sample_is_learned_on_batches_of_any_size(linear: bool, name: str) -> None:
    torch.manual_seed(0)
    model, batches = Price(linear).eval(), [*correlated(33, 12).split(12)]
    error = {}
    for algorithms in ((), (name,)):
        config = QuantizeConfig(weight_bits=4, edge_bits=4, ranges="minmax", algorithms=algorithms, rounding_steps=100)
        made = quantize(model, config, example=batches[0], calibration=batches)
        with torch.no_grad():
            error[algorithms] = sum(float((made(x) - model(x)).square().sum()) for x in batches)
    assert any("of 1 regions" in note for note in made.plan.notes)
    assert error[(name,)] < 0.7 * error[()]


def test_a_shared_weight_stays_as_it_is() -> None:
    given = subject(Twice().eval(), [correlated(64, 4)], steps=5)
    targets = {str(node.args[1].args[0].target) for node in given.anchors()}
    if len(targets) == 3:
        pytest.skip("this torch gives each use of a weight integers of its own")
    adaround(given)
    assert given.notes[0].startswith("adaround left layers that share a weight as they are: shared")


def test_queries_keys_and_values_are_learned_although_samples_are_not_first_behind_them() -> None:
    """Attention written as ``qkv(x).reshape(n, l, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)``, batches of two sizes."""
    config = QuantizeConfig(algorithms=("adaround",), rounding_steps=20, weight_bits=4, edge_bits=4)
    batches = [images(12, 48), images(8, 48, seed=1)]
    float_model = hard_transformer()
    del float_model.layers[2:]
    model = quantize(float_model, config, example=batches[0], calibration=batches)
    undone = [note.split(": ")[-1].split(", ") for note in model.plan.notes if "undone" in note]
    assert sum("qkv" in name for names in undone for name in names) < 2  # of 2
    assert f"adaround: learned the rounding of {10 - sum(map(len, undone))} of 10 regions" in model.plan.notes


def test_samples_are_taken_along_the_dimension_that_counts_them() -> None:
    value, rows = torch.arange(3 * 4 * 5).reshape(3, 4, 5), torch.tensor([2, 0])
    assert torch.equal(_samples(value, 4, rows, 1, (1, 1)), value[:, rows])
    assert torch.equal(_samples(value, 2, torch.tensor([1]), 1, (1, -1)), value[:, 2:])  # two positions of each
    assert torch.equal(_samples(value, 2, torch.tensor([1]), 1, (-1, 1)), value[:, 1::2])  # twice through all
    assert torch.equal(_samples(value, 3, rows, 0, (1, 1)), value[rows])


class Turned(nn.Module):
    """A layer over positions, flattened in front of the samples or behind them, or over halves stacked as samples."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.first, self.last = order, nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        if self.order == "stacked":
            one, other = self._layers(torch.cat((x[:, 0], x[:, 1]))).chunk(2)
            return one - other
        x = x.transpose(0, 1) if self.order != "behind" else x
        if self.order == "turned":
            return self._layers(x).transpose(0, 1)
        x = self._layers(x.reshape(n * t, 6))
        return x.view(n, t, 5) if self.order == "behind" else x.view(t, n, 5).transpose(0, 1)

    def _layers(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("order", ["behind", "in front", "turned"])
def test_layers_over_positions_learn_from_the_samples_that_were_drawn(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, rows, found = Turned(order).eval(), torch.randn(16, 4, 6), torch.tensor([7, 2]), []
    given = subject(model, [x])

    def watched(part: Part, *_: object) -> None:
        given.graph.recompile()
        found.append((part.errors({}, 0, rows), (given.graph(x[rows]) - model(x[rows])).square().sum((0, 1)) / 2))

    monkeypatch.setattr(reconstruct, "_minimise", watched)
    adaround(given)
    torch.testing.assert_close(*found[-1])


def test_layers_where_samples_cannot_be_told_apart_are_left_and_told() -> None:
    given = subject(Turned("stacked").eval(), [torch.randn(16, 4, 6)])
    adaround(given)
    assert given.notes[0] == "adaround left what samples cannot be told apart in: first, last"
