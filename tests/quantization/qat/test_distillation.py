"""Distillation: the loss written out, and taps that read the same value in the float model and in what trains."""

from __future__ import annotations

from typing import Any

import nets
import pytest
import torch
from qat_runs import TEST, config, qat
from qat_runs import trained as trained  # the fixture
from torch import Tensor, nn

from qtool.errors import UsageError
from qtool.quantization.algorithms.passes import Passes
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.engines import pt2e
from qtool.quantization.qat.distillation import Tap, _behind_norms, _ends, _is_same, mean_squares, tapped, towards
from qtool.quantization.qat.fine_tune import check_tuning
from qtool.quantization.stage import _prepare
from qtool.recipe import QatConfig, QuantizeConfig


def pair(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """The float graph, and the graph that trains with its quantizers off."""
    config_ = QuantizeConfig(mode="qat")
    reference = float_form(model, x)
    prepared = _prepare(model, reference, config_, x, Passes(config_, []))
    for fake in pt2e.fake_quantizers(prepared.graph):
        fake.quantizing = fake.observing = False
    prepared.switch(prepared.graph, batch_norm=False, dropout=False)
    return reference, prepared.graph


@pytest.mark.parametrize("make", [nets.small_resnet, nets.small_mobilenet])
def test_what_leaves_a_module_is_one_value_in_both(make: Any) -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    reference, student = pair(nets.settled(make(), 16), x)
    ends = [_ends(graph) for graph in (reference, student)]
    _behind_norms(*ends)
    names = [name for name in ends[0] if name in ends[1] and _is_same(ends[0][name], ends[1][name])]
    assert {"0", "2", "2.body", "4"} <= set(names)
    assert {"0.0", "0.1"} <= set(names), "a layer and its batch-norm are what leaves both"
    assert ends[1]["0.0"] is ends[1]["0.1"]
    before = [len(graph.graph.nodes) for graph in (reference, student)]
    with tapped(reference, student, ["*"]) as taps, torch.no_grad():
        assert len(taps) == len({ends[0][name] for name in names})
        reference(x), student(x)
        for wanted, given in taps:
            torch.testing.assert_close(wanted.value, given.value, atol=2e-5, rtol=0)
    assert [len(graph.graph.nodes) for graph in (reference, student)] == before
    assert not any(isinstance(module, Tap) for graph in (reference, student) for module in graph.modules())


def test_the_loss_is_divergence_and_the_relative_errors() -> None:
    teacher, student = nn.Linear(3, 5), nn.Linear(3, 5)
    x, wants, gives = torch.randn(4, 3), Tap(), Tap()
    wants.value, gives.value = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    total, count = towards(teacher, [(wants, gives)], [2.5])(student, x, None)
    p, q = teacher(x).softmax(1), student(x).softmax(1)
    relative = (wants.value - gives.value).square().sum() / 6 / 2.5
    torch.testing.assert_close(total, (p * (p / q).log()).sum() + relative)
    assert count == 4


def test_a_batch_s_loss_is_that_of_its_parts() -> None:
    """Errors are relative to the mean square of calibration samples, however a batch of training is cut."""
    teacher, student = (nn.Sequential(nn.Linear(3, 6), Tap("wide"), nn.Linear(6, 5)) for _ in range(2))
    taps, x = [(teacher[1], student[1])], torch.randn(9, 3) * torch.arange(9).view(9, 1)
    squares = mean_squares(teacher, taps, [x[:2], x[2:], torch.zeros(16, 3)])
    whole = torch.cat([teacher[0](x), teacher[0](torch.zeros(16, 3))])
    assert squares == pytest.approx([whole.square().mean().item()])
    loss = towards(teacher, taps, squares)
    total, parts = loss(student, x, None)[0], [loss(student, part, None)[0] for part in x.split([1, 3, 5])]
    torch.testing.assert_close(total, torch.stack(parts).sum())
    teacher[0] = nn.Linear(3, 6).requires_grad_(False).apply(lambda layer: nn.init.zeros_(layer.weight))
    teacher[0].bias.zero_()
    with pytest.raises(UsageError, match="got a mean square of 0 of what leaves 'wide'; leave it out"):
        mean_squares(teacher, taps, [x])


def test_one_number_for_each_sample_has_a_squared_error_and_classes_have_none() -> None:
    """The softmax of one number is 1 whatever it is: such a loss would teach nothing."""
    teacher, student, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(4, 3)
    total, _ = towards(teacher)(student, x, None)
    torch.testing.assert_close(total, (teacher(x) - student(x)).square().sum())
    both = [Both(layer) for layer in (teacher, student)]
    torch.testing.assert_close(towards(both[0])(both[1], x, None)[0], total)
    with pytest.raises(UsageError, match="a model that gives floating point numbers; got whole numbers alone"):
        towards(nn.Sequential(teacher, Classes()))(nn.Sequential(student, Classes()), x, None)


def test_rows_with_a_target_for_each_number_have_a_squared_error() -> None:
    """As the outputs of a regression have: what is added to all of a row is an error that no softmax shows."""
    teacher, student, x = nn.Linear(3, 5), nn.Linear(3, 5), torch.randn(4, 3)
    apart = (teacher(x) - student(x)).square().mean(1).sum()
    torch.testing.assert_close(towards(teacher)(student, x, torch.randn(4, 5))[0], apart)
    for several in ({"place": torch.randn(4, 5), "size": torch.randn(4)}, torch.randn(4)):
        torch.testing.assert_close(towards(teacher)(student, x, several)[0], apart)
    classes, shares = (towards(teacher)(student, x, t)[0] for t in (torch.arange(4), torch.eye(5)[:4]))
    torch.testing.assert_close(classes, shares)
    assert not torch.isclose(classes, apart)


@pytest.mark.parametrize(("make", "axis"), [(lambda: nn.Linear(3, 5), 2), (lambda: nn.Conv1d(4, 5, 1), 1)])
def test_logits_of_several_positions_diverge_where_there_are_targets(make: Any, axis: int) -> None:
    """Tokens (N×T×C) and places (N×C×T): what is added to all classes of one is no error, padding is nobody's aim."""
    teacher, student, x = make(), make(), torch.randn(2, 4, 3)
    p, q = (net(x).movedim(axis, -1).softmax(-1) for net in (teacher, student))
    target = torch.zeros(p.shape[:2], dtype=torch.int64)
    target[1, 1:] = -100
    each = (p * (p / q).log()).sum(-1)
    total, count = towards(teacher)(student, x, target)
    torch.testing.assert_close(total, each[0].mean() + each[1, 0])
    assert count == 2
    nowhere = towards(teacher)(student, x, torch.full_like(target, -100))[0]
    assert nowhere == 0
    parts = [towards(teacher)(student, x[i : i + 1], target[i : i + 1])[0] for i in range(2)]
    torch.testing.assert_close(total, torch.stack(parts).sum())
    behind = [Twice(net) for net in (teacher, student)]
    apart = (teacher(x) - student(x)).square().mean((1, 2)).sum()
    torch.testing.assert_close(towards(behind[0])(behind[1], x, target)[0], total + apart)


class Twice(nn.Module):
    """Logits, and what has their shape and is no logits, as an encoder's states may."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := self.layer(x)), y


class Classes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Both(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := self.layer(x)), y.argmax(1)


def test_features_come_closer_when_they_are_asked_for(trained: nn.Module) -> None:
    made = {
        asked: qat(trained, "pt2e", config(epochs=4, learning_rate=5e-3, distill_features=asked))
        for asked in (None, ("first", "relu"))
    }
    with torch.no_grad():
        assert all(bool(one(TEST).isfinite().all()) for one in made.values())
    assert not torch.equal(made[None](TEST), made["first", "relu"](TEST))
    assert all(name.startswith("tap") is False for name, _ in made["first", "relu"].graph.named_modules())


def test_what_cannot_be_compared_is_refused(trained: nn.Module) -> None:
    with pytest.raises(
        UsageError, match=r"--distill-features: expected a module of the model; got 'fist'; did you mean"
    ):
        qat(trained, "pt2e", config(distill_features=("fist",)))
    with pytest.raises(UsageError, match="--engine pt2e"):
        qat(trained, "torch.ao", config(distill_features=("first",)))
    for options, said in (({"distill": False}, "--distill; got --no-distill"), ({"compile": True}, "got --compile")):
        with pytest.raises(UsageError, match=f"--distill-features: expected .*{said}"):
            check_tuning(QatConfig(distill_features=("first",), **options))


def test_labels_that_have_no_part_in_the_loss_are_not_smoothed() -> None:
    with pytest.raises(UsageError, match="--label-smoothing: expected --no-distill"):
        check_tuning(QatConfig(label_smoothing=0.1))
    check_tuning(QatConfig(label_smoothing=0.1, distill=False))
