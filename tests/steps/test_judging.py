import copy
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from stopped import Stop, stop_after
from test_loop import Noisy, config, make_data, make_model, same
from torch import nn
from torch.utils.data import TensorDataset

from qtool.errors import OutOfMemory, QtoolError, QtoolWarning, UsageError
from qtool.steps import judging, loop
from qtool.steps.loop import fit
from qtool.tasks import Classification, LanguageModelling
from qtool.training.stage import train
from qtool.training.techniques import setup


class Wrong(Classification):
    """A task with ``metrics`` and ``finish`` that do what they are told, and the losses of a classification."""

    def __init__(self, metrics=None, finish=None):
        super().__init__()
        object.__setattr__(self, "_metrics", metrics or (lambda output, target: {"top1": float(len(target))}))
        object.__setattr__(self, "_finish", finish or (lambda means: means))

    def metrics(self, output, target):
        return self._metrics(output, target)

    def finish(self, means):
        return self._finish(means)


def test_a_metric_that_raises_is_told_before_the_first_step(tmp_path):
    task = Wrong(metrics=lambda output, target: {"top1": {}["f1"]})
    with pytest.raises(QtoolError, match=r"^task 'classification': expected metrics .* KeyError: 'f1'"):
        fit(make_model(), make_data(), task, config(), out=tmp_path, progress=stop_after(1))
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_part_of_another_shape_is_told_before_the_first_step(part):
    parts = {name: Noisy(12) for name in ("train", "validation", "test")}
    parts[part] = TensorDataset(torch.zeros(4, 2, 6, 6), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(QtoolError, match=f"model, on {part} data: .* RuntimeError"):
        train(make_model(), SimpleNamespace(**parts), config(), task=Classification(), progress=stop_after(1))


class Tokens(nn.Module):
    """Logits of each place from an embedding and from its neighbours: those before it, or the next one too."""

    def __init__(self, ahead):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Conv1d(8, 11, 3)
        self.pad = (2, 0) if not ahead else (1, 1)

    def forward(self, tokens):
        return self.head(nn.functional.pad(self.table(tokens).transpose(1, 2), self.pad)).transpose(1, 2)


@pytest.mark.parametrize(
    ("ahead", "following", "told"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_model_that_reads_what_it_is_to_tell_is_told(ahead, following, told):
    tokens = torch.randint(11, (12, 9), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([tokens[:, 1:], torch.full((12, 1), -100)], 1) if following else tokens.flip(1)
    data = SimpleNamespace(**dict.fromkeys(("train", "validation", "test"), TensorDataset(tokens, targets)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(Tokens(ahead), data, config(epochs=1), task=LanguageModelling())
    messages = [str(each.message) for each in found]
    assert any("it is to tell the next token, and reads it" in message for message in messages) == told


def test_a_finish_that_needs_more_than_one_batch_is_left_to_the_whole():
    """Of an untrained model's answers to a few samples there may be nothing to divide by; a wrong name stays wrong."""
    judged = []

    def finish(means):
        judged.append(means)
        return means | {"f1": 1 / 0 if len(judged) == 1 else 1.0}

    history = fit(make_model(), make_data(), Wrong(finish=finish), config(epochs=1))
    assert (len(judged), history.epochs[0]["validation_f1"]) == (2, 1.0)
    with pytest.raises(QtoolError, match="KeyError: 'recall'"):
        fit(make_model(), make_data(), Wrong(finish=lambda means: means["recall"]), config(), progress=stop_after(1))


def test_a_first_batch_without_weight_is_no_fault():
    class Weighted(Classification):
        def loss(self, output, target):
            loss, _ = super().loss(output, target)
            return loss, float(target.sum())

    data = make_data()
    data.validation = TensorDataset(torch.zeros(16, 2, 5, 5), torch.arange(16) // 8)
    assert fit(make_model(), data, Weighted(), config(epochs=1)).steps == 5


def test_early_stopping_on_a_metric_that_is_not_there_is_told_before_the_first_step():
    task = Wrong(metrics=lambda output, target: {"f1": float(len(target))})
    with pytest.raises(UsageError, match=r"metric 'top1'; got f1, loss; "):
        fit(make_model(), make_data(), task, config(early_stopping=1), progress=stop_after(1))


@pytest.mark.parametrize("stopping", [None, 1])
def test_a_task_whose_own_metric_is_none_is_told_before_the_first_step(stopping):
    task = Wrong(metrics=lambda output, target: {"f1": float(len(target))})
    with pytest.raises(
        UsageError, match=r"expected a 'metric' that it gives; got 'top1'|validation data with the metric 'top1'"
    ):
        fit(make_model(), make_data(), task, config(early_stopping=stopping), progress=stop_after(1))


class Stretched(Wrong):
    """A regression of class indices, whose sums are as they are told to be."""

    def __init__(self, loss, metrics):
        super().__init__(metrics)
        object.__setattr__(self, "_loss", loss)

    def loss(self, output, target):
        return self._loss(output[:, :1], target.float())


@pytest.mark.parametrize(
    ("loss", "metrics", "told"),
    [
        (lambda o, t: ((o[:, 0] - t).square().sum(), float(len(t))), lambda o, t: {"top1": float(len(t))}, None),
        (lambda o, t: ((o[:, 0] - t).square().mean(), float(len(t))), lambda o, t: {"top1": float(len(t))}, "loss"),
        (lambda o, t: ((o - t).square().sum(), float(len(t))), lambda o, t: {"top1": float(len(t))}, "loss"),
        (lambda o, t: ((o[:, 0] - t).square().sum(), 1.0), lambda o, t: {"top1": float(len(t))}, "weight"),
        (lambda o, t: ((o[:, 0] - t).square().sum(), float(len(t))), lambda o, t: {"top1": 1.0}, "top1"),
    ],
    ids=["sums", "mean loss", "stretched", "no number", "mean metric"],
)
def test_what_is_no_sum_over_samples_is_told_before_the_first_step(loss, metrics, told):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with setup(make_model(), config()) as made:
            train = make_data().train
            judging.rehearse(made, train, {"validation": train, "test": train}, 8, Stretched(loss, metrics))
    found = [str(each.message) for each in seen if "no sum over samples" in str(each.message)]
    assert len(found) == (told is not None)
    assert all(f"its {told} of a batch" in each for each in found)


class Counting(nn.Module):
    """Has buffers that every forward pass writes or replaces, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()
        self.register_buffer("written", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced * 0.5 + x.mean().detach()
        return self.inner(x) * (1 + self.replaced)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rehearsal_leaves_no_trace(stopped, tmp_path, monkeypatch):
    """Of random numbers, buffers and modes; at the beginning and after a resume."""

    def trained(folder):
        model = Counting()
        if stopped:
            with pytest.raises(Stop):
                fit(copy.deepcopy(model), make_data(), Classification(), config(), out=folder, progress=stop_after(3))
        return model, fit(model, make_data(), Classification(), config(), out=folder, test=Noisy(9))

    model, history = trained(tmp_path / "with")
    monkeypatch.setattr(loop, "rehearse", lambda *_: {})
    other, without = trained(tmp_path / "without")
    assert history.losses == without.losses
    assert history.epochs == without.epochs
    assert same(model, other)


def test_what_is_compiled_is_not_compiled_by_a_rehearsal(monkeypatch):
    """The size of the first batch that dynamo sees decides how later ones are compiled."""
    compiled, compile = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, options: compile(function, backend=backend))
    model, data = make_model(), make_data()
    with setup(model, config(compile=True)) as made:
        model.eval()
        assert judging.rehearse(made, data.train, {"validation": data.validation}, 8, Classification()) == {
            "validation": {"loss", "top1"}
        }
        assert not compiled
        judging.judge(made, "validation", data.validation, 8, Classification())
        assert compiled


def test_memory_that_a_smaller_micro_batch_spares_is_left_to_the_steps(monkeypatch):
    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, x):
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x)

    assert fit(Full(), make_data(), Classification(), config(epochs=1), backs_off=True).halvings == 1
    with pytest.raises(OutOfMemory, match="evaluation"):
        train(Full(), make_data(), config(epochs=1), task=Classification())


def test_a_loss_that_is_not_finite_in_evaluation_alone_is_told_and_never_the_best():
    """A NaN compares as no better and no worse: taken for the best of all it would end the search at once."""

    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.epochs = make_model(), 0

        def forward(self, x):
            return self.inner(x) * (float("nan") if not self.training and self.epochs < 2 else 1.0)

        def train(self, mode=True):
            self.epochs += mode and hasattr(self, "epochs")
            return super().train(mode)

    class Metric(Classification):
        def metrics(self, output, target):
            return {"top1": output.sum()}

    with pytest.warns(QtoolWarning, match="^validation data: the loss is nan, so that metrics say nothing"):
        history = fit(Bad(), make_data(), Metric(), config(early_stopping=2))
    assert history.best_epoch in (1, 2)
    assert [math.isnan(epoch["validation_loss"]) for epoch in history.epochs] == [True, False, False]
