import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from stopped import Stop, stop_after
from test_loop import TASK, Noisy, config, make_data, make_model, same
from torch import nn

from qtool.errors import QtoolError, UsageError
from qtool.steps import checkpoint, loop
from qtool.steps.loop import Hooks, fit


def scores(values):
    """A task whose validation metric is the next of ``values`` at each call, behind those before training."""
    left = [1.0] * 4 + values  # a batch, and once more with its halves

    class Scripted:
        name, metric, higher_is_better = "scripted", "score", True

        def loss(self, output, target):
            return TASK.loss(output, target)

        def metrics(self, output, target):
            return {"score": torch.tensor(left.pop(0) * len(target))}

    return Scripted()


@pytest.mark.parametrize("on_disk", [True, False])
def test_early_stopping_keeps_the_best_weights(on_disk, tmp_path):
    kept = {}

    class Record(Hooks):
        def after_epoch(self, model, epoch, metrics):
            kept[epoch] = {name: value.clone() for name, value in model.state_dict().items()}

    model, data = make_model(), make_data()
    data.validation = Noisy(8, seed=1)
    history = fit(
        model, data, scores([0.1, 0.5, 0.5, 0.2, 0.9]), config(epochs=5, early_stopping=2), hooks=Record(),
        out=tmp_path if on_disk else None,
    )  # fmt: skip
    assert (len(history.epochs), history.best_epoch, history.stopped_early) == (4, 1, True)
    assert history.best_metric == pytest.approx(0.5)
    assert all(torch.equal(value, kept[1][name]) for name, value in model.state_dict().items())
    assert not torch.equal(kept[1]["5.weight"], kept[3]["5.weight"])


class Counting(nn.Module):
    """A layer whose state is no tensor: how often it was called in training."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_the_best_of_a_state_that_is_no_tensor_is_kept_too():
    model, data, seen = nn.Sequential(*make_model(), Counting()), make_data(), []

    class Record(Hooks):
        def after_epoch(self, model, epoch, metrics):
            seen.append(model[-1].calls)

    data.validation = Noisy(8, seed=1)
    fit(model, data, scores([0.5, 0.2]), config(epochs=2, early_stopping=1), hooks=Record())
    assert model[-1].calls == seen[0] < seen[1]


class Late(nn.Module):
    """Moves buffers that no state has: one from the first step on, the other from the sixth."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("early", torch.zeros(4), persistent=False)
        self.register_buffer("late", torch.ones(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.early += 1
            self.late += self.steps > 5
        return self.layer(x)


@pytest.mark.parametrize("kept", [False, True])
def test_the_best_weights_have_their_buffers_also_those_that_moved_later_for_the_first_time(kept, tmp_path):
    options = config(batch_size=4, early_stopping=2, learning_rate=1e-12)  # so that no epoch is better than the first
    part = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 48).view(12, 4), torch.arange(12) % 3)
    data = SimpleNamespace(train=part, validation=part, identity="fixed")
    if kept:
        with pytest.raises(Stop):
            fit(Late(), data, TASK, options, out=tmp_path, progress=stop_after(8))
    model = Late()
    assert fit(model, data, TASK, options, out=tmp_path if kept else None).best_epoch == 0
    assert (model.steps, model.early[0], model.late[0]) == (3, 3, 1)


def test_the_best_weights_are_those_of_the_epoch_that_its_checkpoint_says(tmp_path, monkeypatch):
    """Whatever a run is killed between, and though the epoch that it makes again turns out otherwise."""
    metrics, judged, committed = [0.5, 0.9], [], checkpoint.Files.commit

    class Watch(Hooks):
        def after_epoch(self, model, epoch, metrics):
            judged.append({name: value.clone() for name, value in model.state_dict().items()})

    def killed(files, folder, step, *rest):
        if step == 10:
            raise Stop
        return committed(files, folder, step, *rest)

    monkeypatch.setattr(loop, "judge", lambda *_: {"top1": metrics.pop(0)})
    monkeypatch.setattr(checkpoint.Files, "commit", killed)
    options = config(early_stopping=3, checkpoint_every=None)
    with pytest.raises(Stop):
        fit(make_model(), make_data(), TASK, options, out=tmp_path, hooks=Watch())
    monkeypatch.setattr(checkpoint.Files, "commit", committed)
    metrics += [0.4, 0.3]
    history = fit(model := make_model(), make_data(), TASK, options, out=tmp_path, hooks=Watch())
    assert history.best_epoch == 0
    assert all(torch.equal(value, judged[0][name]) for name, value in model.state_dict().items())


def test_a_run_stopped_before_its_best_weights_are_kept_keeps_them_when_it_goes_on(tmp_path, monkeypatch):
    options = config(early_stopping=1, epochs=1)
    whole = make_model()
    fit(whole, make_data(), TASK, options, out=tmp_path / "whole")
    kept = checkpoint.Files.keep_best
    monkeypatch.setattr(checkpoint.Files, "keep_best", lambda *_: stop_after(0)(SimpleNamespace(step=0)))
    with pytest.raises(Stop):
        fit(make_model(), make_data(), TASK, options, out=tmp_path / "stopped")
    monkeypatch.setattr(checkpoint.Files, "keep_best", kept)
    resumed = make_model()
    assert fit(resumed, make_data(), TASK, options, out=tmp_path / "stopped").best_epoch == 0
    assert same(resumed, whole)


def test_of_damaged_best_weights_it_is_told_what_to_delete(tmp_path):
    """Without the file alone a run would end as it did, and be told the same."""
    folder = tmp_path / "checkpoints"
    data = make_data()
    data.validation = Noisy(8, seed=1)

    def run():
        return fit(make_model(), data, scores([0.5, 0.1]), config(epochs=2, early_stopping=2), out=tmp_path)

    run()
    best = folder / "best.safetensors"
    best.write_bytes(best.read_bytes()[:-10])
    for damage in (best.unlink, lambda: shutil.rmtree(folder)):
        with pytest.raises(QtoolError, match=f"delete '{re.escape(str(folder))}' to start over"):
            run()
        damage()
    assert run().steps


def test_patience_is_part_of_a_resume(tmp_path):
    data = make_data()
    data.validation = Noisy(8, seed=1)
    options = config(epochs=9, early_stopping=3)
    with pytest.raises(Stop):
        fit(make_model(), data, scores([0.5, 0.1, 0.1]), options, out=tmp_path, progress=stop_after(16))
    history = fit(make_model(), data, scores([0.1, 0.9]), options, out=tmp_path)
    assert (len(history.epochs), history.best_epoch, history.stopped_early) == (4, 0, True)


@pytest.mark.parametrize("steps", [None, 12])
def test_a_run_that_made_all_its_steps_was_not_stopped(steps):
    data = make_data()
    data.validation = Noisy(8, seed=1)
    options = config(epochs=3, max_steps=steps, early_stopping=2)
    history = fit(make_model(), data, scores([0.5, 0.1, 0.1]), options)
    assert (len(history.epochs), history.best_epoch, history.stopped_early) == (3, 0, False)


def test_early_stopping_needs_validation_data():
    data = make_data()
    data.validation = None
    with pytest.raises(UsageError, match="top1"):
        fit(make_model(), data, TASK, config(epochs=1, early_stopping=1), progress=stop_after(1))
    assert fit(make_model(), data, TASK, config(epochs=1)).epochs[0].keys() == {"loss"}
