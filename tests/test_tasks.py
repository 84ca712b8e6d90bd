"""Tasks: sums and weights that average right, and errors that say what a task needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fake_device import Fake, Hidden
from torch import Tensor, nn
from torch.nn import functional as F

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.evaluate import evaluate
from qtool.source import open_task
from qtool.tasks import (
    Classification,
    LanguageModelling,
    Task,
    finished,
    is_higher_better,
    load_task,
    loss_of,
    metrics_of,
    require_task,
)

TASK = """
import torch
class Squared:
    name, metric, higher_is_better = "regression", "mae", False
    def loss(self, output, target):
        return (output - target).square().sum(), float(len(target))
    def metrics(self, output, target):
        return {"mae": (output - target).abs().sum()}
def build():
    return Squared()
def half():
    return object()
"""


def test_loss_is_a_sum_with_its_weight() -> None:
    output, target = torch.randn(7, 4, requires_grad=True), torch.randint(0, 4, (7,))
    total, weight = Classification().loss(output, target)
    assert weight == 7
    torch.testing.assert_close(total / weight, F.cross_entropy(output, target))
    total.backward()
    assert output.grad is not None


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_samples_without_a_class_are_not_counted(label_smoothing: float) -> None:
    output, target = torch.randn(9, 7), torch.randint(0, 7, (9,))
    target[[2, 5, 6]] = -100
    counted, task = target != -100, Classification(label_smoothing)
    total, weight = task.loss(output, target)
    torch.testing.assert_close(total / weight, F.cross_entropy(output, target, label_smoothing=label_smoothing))
    found = evaluate(lambda x: x, [(output[:5], target[:5]), (output[5:], target[5:])], task)
    alone = evaluate(lambda x: x, [(output[counted], target[counted])], task)
    assert found == pytest.approx(alone)
    assert found["loss"] == pytest.approx(F.cross_entropy(output, target).item()), "smoothing is training's alone"
    assert found["num_samples"] == 6


def test_label_smoothing_is_mixing_with_the_uniform() -> None:
    output, target = torch.randn(7, 4), torch.randint(0, 4, (7,))
    smoothed, _ = load_task("classification", label_smoothing=0.2).loss(output, target)
    log_p = output.log_softmax(1)
    mixed = 0.8 * F.one_hot(target, 4) + 0.2 / 4
    torch.testing.assert_close(smoothed, -(mixed * log_p).sum())


def test_half_precision_outputs_are_summed_in_float32() -> None:
    total, _ = Classification().loss(torch.randn(7, 4).half(), torch.zeros(7, dtype=torch.int64))
    assert total.dtype == torch.float32


class NamedOutput(NamedTuple):
    hidden_states: Any
    logits: Tensor


@dataclass
class DataOutput:
    hidden_states: Any
    logits: Tensor


@pytest.mark.parametrize("kind", [dict, NamedOutput, DataOutput])
@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_the_logits_among_outputs_are_judged(kind: Any, shape: tuple[int, ...]) -> None:
    """An output of transformers' models is a mapping, with hidden states and keys beside them."""
    output, target = torch.randn(*shape, 4), torch.randint(0, 4, shape)
    task: Task = Classification() if len(shape) == 1 else LanguageModelling()
    among = kind(hidden_states=(torch.zeros(7, 9),), logits=output)
    assert float(task.loss(among, target)[0]) == float(task.loss(output, target)[0])
    assert task.metrics(among, target) == task.metrics(output, target)
    with pytest.raises(QtoolError, match="got output dict"):
        task.loss({"scores": output}, target)


def test_metrics_count_the_right_ones() -> None:
    output = torch.tensor([[9, 5, 4, 3, 2, 1.0], [9, 5, 4, 3, 2, 1], [9, 5, 4, 3, 2, 1]])
    sums = Classification().metrics(output, torch.tensor([0, 4, 5]))
    assert {name: float(value) for name, value in sums.items()} == {"top1": 1, "top5": 2}
    assert set(Classification().metrics(output[:, :5], torch.tensor([0, 1, 2]))) == {"top1"}


def test_more_is_better_of_shares_and_less_of_losses(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TASK)
    known = {
        Classification(): {"top1": True, "top5": True, "loss": False},
        LanguageModelling(): {"top1": True, "perplexity": False, "loss": False, "other": None},
        load_task(f"{tmp_path / 't.py'}:build"): {"mae": False, "loss": False, "other": None},
    }
    for task, directions in known.items():
        assert {name: is_higher_better(task, name) for name in directions} == directions


def test_a_users_task(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TASK)
    task = load_task(f"{tmp_path / 't.py'}:build")
    assert isinstance(task, Task)
    assert (task.name, task.metric, task.higher_is_better) == ("regression", "mae", False)
    with pytest.raises(QtoolError, match="no name, metric, higher_is_better, loss, metrics"):
        load_task(f"{tmp_path / 't.py'}:half")


class Own:
    """A task that gives what it was told to."""

    name, metric, higher_is_better = "own", "loss", False

    def __init__(self, loss: Any, metrics: Any = None) -> None:
        self.given, self.sums = loss, {} if metrics is None else metrics

    def loss(self, output: Any, target: Any) -> Any:
        return self.given(output) if callable(self.given) else self.given

    def metrics(self, output: Any, target: Any) -> Any:
        return self.sums


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda o: o.sum(), r"got tensor of shape \(\)"),
        (lambda o: (o.sum(1), 3.0), r"got a pair of tensor of shape \(3,\) and float"),
        (lambda o: ({"boxes": o.sum()}, 3), "got a pair of dict and int"),
        (lambda o: (o.sum(), 3.0, {}), "got tuple of 3"),
        (lambda o: (o.detach().sum(), 3.0), "one without a gradient"),
        (lambda o: o.no_such_thing, "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"),
    ],
)
def test_what_a_users_task_gives_in_the_place_of_a_loss_is_told(given: Any, told: str) -> None:
    output = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(QtoolError, match=rf"task 'own': expected .*{told}"):
        loss_of(Own(given), output, None)
    loss, weight = loss_of(Own(lambda o: (o.sum(), 3)), output, None)
    assert (loss.item(), weight) == (pytest.approx(output.sum().item()), 3)
    with torch.no_grad():
        assert loss_of(Own((1.5, 3)), output, None) == (1.5, 3)


def test_what_a_users_task_gives_in_the_place_of_metrics_is_told() -> None:
    for sums, told in (([1.0], "got list of 1"), ({"top1": torch.ones(3)}, r"'top1', tensor of shape \(3,\)")):
        with pytest.raises(QtoolError, match=rf"task 'own': expected metrics.*{told}"):
            metrics_of(Own(None, sums), None, None)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(Own(_no_memory), None, None)


def _no_memory(output: Any) -> Any:
    raise torch.OutOfMemoryError("allocate memory")


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (lambda means: means["f1"], "metrics by 'finish' of the means of its sums; got KeyError: 'f1'"),
        (lambda means: 0.5, "names and one number each; got float from 'finish'"),
        (lambda means: {"f1": torch.ones(2)}, "names and one number each; got dict from 'finish'"),
    ],
)
def test_what_a_users_task_finishes_with_is_told(finish: Any, told: str) -> None:
    task = Own(None)
    task.finish = finish  # type: ignore[attr-defined]
    with pytest.raises(QtoolError, match=f"task 'own': expected .*{told}"):
        finished(task, {"loss": 1.0})
    task.finish = lambda means: {"half": torch.tensor(means["loss"] / 2)}  # type: ignore[attr-defined]
    assert finished(task, {"loss": 1.0}) == {"half": 0.5}
    assert finished(Own(None), {"loss": 1.0}) == {"loss": 1.0}


def test_what_is_no_task_is_told() -> None:
    with pytest.raises(QtoolError, match=r"argument 'task'.*a function with no name, metric"):
        open_task(F.cross_entropy)
    assert open_task(task := Own(None)) is task


def test_a_direction_that_is_no_truth_value_is_told() -> None:
    task = Own(None)
    task.higher_is_better = "no"  # type: ignore[assignment]  # which python takes for true
    with pytest.raises(QtoolError, match="'higher_is_better' that is True or False; got 'no'"):
        require_task(task, "task")


def test_wrong_outputs_and_names() -> None:
    with pytest.raises(QtoolError, match="N×classes logits"):
        Classification().loss(torch.randn(3, 4, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(QtoolError, match="N×classes logits"):
        Classification().metrics((torch.randn(3, 4),), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(QtoolError, match="below the model's 4 outputs; got 4, of sample 2 of the batch; build"):
        Classification().loss(torch.randn(3, 4), torch.tensor([0, 1, 4]))
    with pytest.raises(QtoolError, match="targets of float32"):
        Classification().loss(torch.randn(3, 4), torch.zeros(3))
    with pytest.raises(UsageError, match="did you mean 'classification'"):
        load_task("clasification")


def test_a_class_that_a_model_has_no_output_for_is_told_before_a_gpu_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on, and refuse everything from then on."""
    monkeypatch.setattr(F, "cross_entropy", lambda output, *_, **__: output.sum())
    output, target = torch.randn(3, 4), torch.tensor([0, 4, -100])
    with Fake(), torch.no_grad(), pytest.raises(QtoolError, match="below the model's 4 outputs; got 4, of sample 1 "):
        Classification().loss(Hidden(output), Hidden(target))


def test_language_modelling_counts_tokens() -> None:
    output, target = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    target[0, 2:] = target[2, 0] = -100
    for smoothing in (0.0, 0.1):
        task = load_task("language-modelling", label_smoothing=smoothing)
        loss, weight = task.loss(output, target)
        mean = F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=smoothing)
        assert float(weight) == 11
        assert float(loss) / 11 == pytest.approx(mean.item(), rel=1e-5)
        counted = target != -100
        assert task.metrics(output, target)["top1"] == (output.argmax(-1) == target)[counted].sum()
        found = evaluate(lambda x: x, [(output[:1], target[:1]), (output[1:], target[1:])], task)
        plain = F.cross_entropy(output.flatten(0, 1), target.flatten()).exp().item()
        assert found["perplexity"] == pytest.approx(plain, rel=1e-5)
        assert found["loss"] == pytest.approx(math.log(plain), rel=1e-5), "smoothing is training's alone"
        assert found.keys() == {"num_samples", "loss", "top1", "perplexity"}
        assert found["num_samples"] == 11
    assert isinstance(task, Task)
    assert LanguageModelling().finish({"loss": 1e4})["perplexity"] == float("inf")


def test_language_modelling_wants_sequences() -> None:
    with pytest.raises(QtoolError, match=r"got output \(3, 7\), target \(3,\); use a language model"):
        LanguageModelling().loss(torch.randn(3, 7), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        (torch.zeros(2, 7, 5), "--task language-modelling"),
        (torch.zeros(2, 4, 8, 8), "a task of your own, --task FILE.py"),
    ],
)
def test_another_output_is_told_which_task_may_take_it(output: torch.Tensor, advice: str) -> None:
    with pytest.raises(QtoolError, match=advice):
        Classification().loss(output, torch.zeros(output.shape[0], *output.shape[2:], dtype=torch.int64))


def test_batches_given_as_samples_are_told_to_be_taken_apart() -> None:
    """The list of batches that is right as the data themselves is a data set of one sample a batch in a mapping."""
    drawn = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(12)]
    parts: dict[str, list[Any]] = {"train": drawn[:8], "test": drawn[8:]}
    with pytest.raises(QtoolError, match="or single samples where each of these is a batch"):
        qtool.train(nn.Linear(3, 2), parts, epochs=1)
    apart = {name: [pair for x, y in part for pair in zip(x, y, strict=True)] for name, part in parts.items()}
    assert qtool.train(nn.Linear(3, 2), apart, epochs=1).metrics["num_samples"] == 16


def test_logits_of_tokens_beside_a_class_for_each_sample_are_no_language_modelling() -> None:
    output, target = torch.zeros(2, 7, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(QtoolError, match="or pass a task of your own, --task FILE"):
        Classification().loss(output, target)
    with pytest.raises(QtoolError, match="task 'language-modelling': expected"):
        LanguageModelling().loss(output, target)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_indices_of_any_integer_type_are_classes(dtype: torch.dtype) -> None:
    output, target = torch.randn(8, 200), torch.tensor([0, 1, 2, 3, 4, 5, 100, 156])
    task = Classification()
    assert task.metrics(output, target.to(dtype)) == task.metrics(output, target)
    assert [float(x) for x in task.loss(output, target.to(dtype))] == [float(x) for x in task.loss(output, target)]


def test_a_class_of_a_task_stands_for_one_of_it() -> None:
    assert isinstance(open_task(Classification), Classification)  # type: ignore[arg-type]

    class Weighed(Classification):
        def __init__(self, weight: float) -> None: ...

    with pytest.raises(
        QtoolError, match=r"argument 'task': expected a task; got the class Weighed: TypeError: .*weight"
    ):
        open_task(Weighed)  # type: ignore[arg-type]
