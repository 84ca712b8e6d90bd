"""Learned scales and biases: gradients against torch's own operator, a gain at the output, and what undoes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hard_nets import forms, hard_mobilenet, images
from test_adaround import Killed, killed_at
from test_bias import BATCHES, biases, subject
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.evaluate import sqnr_db
from qtool.form import quantized
from qtool.quantization.algorithms import steps
from qtool.quantization.algorithms.steps import learn_steps
from qtool.quantization.algorithms.student import Rounded, Student
from qtool.quantization.algorithms.subject import Declined, Subject
from qtool.quantization.calibration.saved_ranges import read_ranges
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

QUANTIZERS = (quantized.quantize_per_tensor.default, quantized.dequantize_per_tensor.default)


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "EPOCHS", 4)
    monkeypatch.setattr(steps, "BATCH", 8)
    monkeypatch.setattr(steps, "SAMPLES", 8)


def grids(graph: GraphModule) -> list[tuple[object, ...]]:
    """Scale, zero point and ends of every quantizer and of what reads it."""
    return [node.args[1:5] for node in graph.graph.nodes if node.target in QUANTIZERS]


def numbers(given: Subject) -> tuple[list[tuple[object, ...]], dict[str, Tensor]]:
    return grids(given.graph), biases(given.graph, [node.name for node in given.anchors()])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("zero", [0, 90])
def test_rounding_and_its_gradients_are_those_of_torchs_learnable_quantizer(
    layout: torch.memory_format, zero: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, 3).contiguous(memory_format=layout)
    upstream, step, found = torch.randn(2, 5, 7, 3), 0.011, []
    for own in (True, False):
        value, scale = x.clone().requires_grad_(), torch.tensor([step], requires_grad=True)
        if own:
            made = Rounded.apply(value, scale[0], float(scale.detach()), -zero, 255 - zero)
        else:
            points = torch.tensor([float(zero)])
            made = torch._fake_quantize_learnable_per_tensor_affine(value, scale, points, 0, 255, 1.0)
        made.backward(upstream)
        found.append((made.detach(), value.grad, scale.grad))
    for own, torchs in zip(*found, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limits", [(-1.0, 0.0), (-1.0, 0.25), (0.0, 0.5)])
def test_a_scale_may_grow_until_an_end_of_its_range_is_where_the_activation_clips(limits: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(*limits), nn.Linear(8, 2))
    model[0].weight.data *= 9
    student = Student(subject(model.eval(), [torch.randn(64, 6)]))
    assert float(student._most.min()) == pytest.approx((limits[1] - limits[0]) / 255, rel=0.01)


def test_before_it_learns_the_student_is_the_graph() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    student = Student(given)
    student.prepare(BATCHES[0])
    with torch.no_grad():
        torch.testing.assert_close(student(BATCHES[1]), given.graph(BATCHES[1]))


def test_the_output_comes_nearer_on_other_samples_and_all_of_the_graph_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "EPOCHS", 16)
    model, test = hard_mobilenet(), images(128, seed=9)
    given = subject(model, BATCHES)
    with torch.no_grad():
        before = sqnr_db(model(test), given.graph(test))
        learn_steps(given)
        after = sqnr_db(model(test), given.graph(test))
    assert after > before + 1
    assert "scales and the biases of 12 layers, +" in given.notes[0]
    for node in given.graph.graph.nodes:
        if node.target is QUANTIZERS[1]:
            assert node.args[1:] == node.args[0].args[1:]


def contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each of the samples held out come out a tenth farther off, with a little variation."""
    real, calls = steps.errors, []

    def told(student: Student, samples: steps.Samples) -> Tensor:
        calls.append(samples)
        found = real(student, samples)
        worse = torch.linspace(1.05, 1.15, len(found))
        return torch.ones(len(found)) * (worse if len(calls) == 4 else 1.0) if samples.held else found

    monkeypatch.setattr(steps, "errors", told)


@pytest.mark.parametrize("how", ["too fast", "held out"])
def test_what_comes_no_nearer_is_undone(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "too fast":
        monkeypatch.setattr(steps, "RATE", 3.0)
    else:
        contradict(monkeypatch)
    given = subject(hard_mobilenet(), BATCHES)
    (grids_before, biases_before), ranges = numbers(given), json.dumps(given.ranges)
    learn_steps(given)
    grids_after, biases_after = numbers(given)
    assert "undone" in given.notes[0]
    assert grids_after == grids_before
    assert all(torch.equal(biases_after[name], value) for name, value in biases_before.items())
    assert json.dumps(given.ranges) == ranges


def test_samples_held_out_are_never_trained_on() -> None:
    given = subject(hard_mobilenet(), [images(16), images(3, seed=1)])
    with steps.Samples(given, held=True) as unseen, steps.Samples(given, held=False) as seen:
        sizes = [sum(len(piece) for piece, _ in each) for each in (unseen, seen)]
        held = torch.cat([piece for piece, _ in unseen])
        trained = torch.cat([piece for piece, _ in seen])
        counts = [sum(len(piece) for piece, _ in group) for group in seen.steps()]
    assert sizes == [3, 16]
    assert counts == [8, 8]
    assert not any(torch.equal(a, b) for a in held for b in trained)


def test_scales_that_share_stay_equal_and_a_limit_is_still_clipped_at() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 49, 3)).eval()
    with torch.no_grad():
        model[0].bias.add_(4.0)
    given = subject(model, BATCHES)
    student = Student(given)
    student.prepare(BATCHES[0])
    with torch.no_grad():
        student.learned += 0.5
        student.limit()
    student.store()
    scales = [grid[0] for grid in grids(given.graph)]
    assert len(set(scales)) == 2
    assert scales[0] == pytest.approx(student.groups[0].scale * 1.6487, rel=1e-4)
    assert scales[-1] * 255 == pytest.approx(6.0, rel=1e-2)
    assert scales[-1] * 254.5 <= 6.0


def test_a_range_that_the_operator_decides_stays() -> None:
    torch.manual_seed(0)
    given = subject(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 2)).eval(), [torch.randn(32, 6)])
    assert all(group.name != "1" for group in Student(given).groups)


def test_a_run_that_was_killed_goes_on_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    def one(**fields: object) -> Subject:
        given = subject(hard_mobilenet(), BATCHES)
        vars(given).update(fields)
        return given

    whole, killed = one(), one(scratch=tmp_path, report=killed_at(7))
    learn_steps(whole)
    with pytest.raises(Killed):
        learn_steps(killed)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    begun: list[int] = []
    resumed = one(scratch=tmp_path, report=lambda what, done, total: begun.append(done))
    learn_steps(resumed)
    assert min(begun) == 6
    assert numbers(resumed)[0] == numbers(whole)[0]
    expected = numbers(whole)[1]
    assert all(torch.equal(value, expected[name]) for name, value in numbers(resumed)[1].items())


def test_saved_ranges_repeat_it_without_data(tmp_path: Path) -> None:
    model, config = hard_mobilenet(), QuantizeConfig(ranges="minmax", algorithms=("steps",))
    first = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms(model))
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(first.ranges))
    read_ranges(path)
    config = dataclasses.replace(config, ranges_from=str(path))
    again = quantize(model, config, example=BATCHES[0], forms=forms(model))
    assert torch.equal(first(BATCHES[0]), again(BATCHES[0]))
    assert any(note.startswith("steps: as saved") for note in again.plan.notes)


def test_outputs_of_different_sizes_count_alike() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x).relu()
            return self.a(x), 1000 * self.b(x)

    torch.manual_seed(0)
    with steps.Samples(subject(Two().eval(), [torch.randn(16, 6)]), held=False) as samples:
        wanted = next(iter(samples))[1]
    squares = [part.square().mean() for part in wanted.split([8 * 3, 8 * 2])]
    torch.testing.assert_close(torch.stack(squares), torch.ones(2))


@pytest.mark.parametrize(
    ("batches", "overrides", "reason"),
    [([images(4)], None, "8 are the fewest"), (BATCHES, {"*": "float"}, "no activation")],
)
def test_it_declines(batches: list[Tensor], overrides: dict[str, str] | None, reason: str) -> None:
    make: Callable[..., Subject] = subject
    if overrides:
        given = make(hard_mobilenet(), batches)
        given.graph = given.reference
    else:
        given = make(hard_mobilenet(), batches)
    with pytest.raises(Declined, match=reason):
        learn_steps(given)


def test_it_declines_a_model_that_gives_classes() -> None:
    """Such as a segmentation that ends in an arg-max."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).argmax(1)

    config = QuantizeConfig(effort="best")
    form = quantize(Classes().eval(), config, example=images(2), calibration=[images(16)])
    assert "steps declined: the model gives no floating point numbers to learn from" in form.plan.notes
