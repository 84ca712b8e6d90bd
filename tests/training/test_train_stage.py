import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qtool.errors import OutOfMemory, QtoolError
from qtool.recipe import TrainConfig
from qtool.stages import training as stages
from qtool.steps.history import Progress
from qtool.system import machine
from qtool.tasks import load_task
from qtool.training.progress import describe, reporter
from qtool.training.stage import train

TASK = load_task("classification")
CONFIG = TrainConfig(device="cpu", epochs=2, batch_size=8)


class Points:
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 3, (count,), generator=generator)
        self.inputs = torch.randn(count, 4, generator=generator) + 3 * self.targets[:, None]

    def __len__(self):
        return len(self.targets)

    def batch(self, positions):
        return self.inputs[positions], self.targets[positions]


def make_data():
    return SimpleNamespace(train=Points(60, 0), validation=Points(20, 1), test=Points(20, 2), identity="points")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_weights_that_the_device_has_no_room_for_are_told_as_such(monkeypatch, error):
    def full(*args):
        raise error

    monkeypatch.setattr("qtool.training.precision.move", full)
    with pytest.raises(OutOfMemory, match=r"model: expected memory for its weights; got none left, .* --lora-base nf4"):
        train(make_model(), make_data(), CONFIG, task=TASK)


def test_the_stage_trains_judges_and_leaves_checkpoints(tmp_path):
    model = make_model()
    result = train(model, make_data(), CONFIG, task=TASK, out=tmp_path)
    assert result.model is model
    assert not model.training
    assert result.history.steps == 16
    assert set(result.metrics) == {"num_samples", "loss", "top1"}
    right = (model(make_data().test.inputs).argmax(1) == make_data().test.targets).double().mean().item()
    assert result.metrics["top1"] == pytest.approx(right)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000016.safetensors"]


def test_a_test_part_that_draws_is_judged_alike_whatever_the_caller_drew():
    class Noisy(Points):
        def batch(self, positions):
            inputs, targets = super().batch(positions)
            return inputs + torch.randn_like(inputs), targets

    found = []
    for _ in range(2):
        torch.rand(3)
        data = make_data()
        data.test = Noisy(17, 2)
        found.append(train(make_model(), data, CONFIG, task=TASK).metrics)
    assert found[0] == found[1]


def test_an_iterable_of_batches_is_enough():
    batches = [Points(8, seed).batch(list(range(8))) for seed in range(4)]
    result = train(make_model(), batches, CONFIG, task=TASK)
    assert result.metrics == {}
    assert result.history.steps == 8


def test_given_batches_are_cut_into_as_many_micro_batches_as_are_asked_for():
    """Whatever their size; the batch size of a recipe is that of batches which are made here."""
    sizes = []

    def loss(model, value, target):
        sizes.append(len(value))
        return nn.functional.cross_entropy(model(value), target, reduction="sum"), float(len(target))

    batches = [Points(size, 0).batch(list(range(size))) for size in (12, 20)]
    train(make_model(), batches, TrainConfig(device="cpu", epochs=1, batch_size=8, micro_batches=4), task=TASK,
          loss_fn=loss)  # fmt: skip
    assert sizes == [3, 3, 3, 3, 5, 5, 5, 5]
    sizes.clear()
    train(make_model(), batches, CONFIG, task=TASK, loss_fn=loss, halvings=1)
    assert sizes[:4] == [6, 6, 10, 10]


def test_the_loss_and_the_metrics_get_targets_as_they_are():
    """Those of a regression, which 16 bits would round, or make infinite."""
    seen = []

    class Prices:
        name, metric, higher_is_better = "prices", "loss", False

        def loss(self, output, target):
            seen.append(target)
            return (output - target).square().sum(), float(len(target))

        def metrics(self, output, target):
            return {}

    x, y = torch.randn(6, 6), torch.full((6, 1), 70_001.0)
    parts = SimpleNamespace(train=TensorDataset(x, y), validation=TensorDataset(x, y), test=TensorDataset(x, y))
    options = {"device": "cpu", "epochs": 1, "batch_size": 6, "precision": "bf16-true"}
    train(nn.Linear(6, 1), parts, TrainConfig(**options), task=Prices())
    assert len(seen) >= 5
    assert all(torch.equal(target, y[: len(target)]) for target in seen)


def test_the_model_is_restored_even_when_training_fails():
    model = make_model()
    data = make_data()
    data.train.inputs[:] = float("nan")
    with pytest.raises(QtoolError, match="finite loss"):
        train(model, data, TrainConfig(device="cpu", precision="bf16-true", epochs=1), task=TASK)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(QtoolError, match="CUDA"):
        train(make_model(), make_data(), TrainConfig(device="cuda"), task=TASK)


def test_silent_unless_asked(capsys, monkeypatch):
    train(make_model(), make_data(), CONFIG, task=TASK)
    seen = []
    train(make_model(), make_data(), CONFIG, task=TASK, progress=seen.append)
    assert len([at for at in seen if not at.ends]) == 16
    assert capsys.readouterr() == ("", "")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    train(make_model(), make_data(), CONFIG, task=TASK, progress=True)
    assert "loss" in stream.getvalue()
    assert "16/16" in stream.getvalue()


def test_a_line_tells_loss_rate_memory_and_metric():
    judged = {"loss": 1.0, "validation_loss": 0.5, "validation_recall": 0.75, "validation_f1": 0.875}
    line = describe(Progress(5, 10, 1, 0.51, 2e-3, 2**30, judged, "f1"))
    assert line == "epoch 2 loss 0.5100 rate 0.002 1,024 MiB f1 0.875"
    assert describe(Progress(5, 10, 1, 0.51, 2e-3, 2**30, judged, "loss")).endswith(" MiB validation loss 0.5")
    assert describe(Progress(5, 10, 1, -1e-9, 2e-3, 2**30, {}, "f1")) == "epoch 2 loss 0.0000 rate 0.002 1,024 MiB"


def test_reporter_passes_functions_through():
    with reporter(print) as report:
        assert report is print
    for nothing in (False, None):
        with reporter(nothing) as report:
            assert report is None


@pytest.mark.parametrize(("precision", "features", "told"), [
    ("bf16-mixed", ["avx2"], True), ("bf16-mixed", ["avx2", "avx512f"], False), ("32-true", ["avx2"], False),
    ("bf16-true", ["asimddp"], False),
])  # fmt: skip
def test_where_bfloat16_is_slow_it_is_told(monkeypatch, precision, features, told):
    monkeypatch.setattr(machine, "cpu_info", lambda: {"features": features})
    lines = []
    stages._tell_slow(TrainConfig(device="cpu", precision=precision), lines.append)
    assert ["--precision 32-true is quicker here" in line for line in lines] == [True] * told
