"""Predictions of models that choose by values, against what they allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qtool.errors import QtoolError
from qtool.memory import trial
from qtool.memory.measure import measure
from qtool.memory.predict import predict
from qtool.memory.tracker import Prediction
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.tasks import load_task
from qtool.training.techniques import setup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
LOSS = task_loss(load_task("classification"))
WIDTH, SAMPLES = 32, 512


def config(**options: Any) -> TrainConfig:
    return TrainConfig(device="cpu", **{"batch_size": SAMPLES, **options})


def batch(size: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.zeros(size, dtype=torch.int64)


class Routed(nn.Module):
    """Rows to experts, one for each, by masks; an expert without rows is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                out[mask] = expert(x[mask]).to(out.dtype)
        return x + out * weight[:, None]


class Counted(Routed):
    """The same by rows in the order of their experts, and how many each has."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x).softmax(-1).max(-1)
        order = chosen.argsort()
        parts = x[order].split(chosen.bincount(minlength=2).tolist())
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x + torch.zeros_like(found).index_copy(0, order, found) * weight[:, None]


class Trimmed(nn.Module):
    """As wide as the row with the most positive values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : int((x > 0).sum(1).max())]
        return self.up(x[:, :, None]).relu().mean(1)


class Packed(nn.Module):
    """Rows up to their last positive value, as sequences; what the last step of each tells, or the largest of all."""

    def __init__(self, kind: type[nn.RNNBase], padded: bool) -> None:
        super().__init__()
        self.cells, self.padded = kind(1, 24, bidirectional=True, batch_first=True), padded

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :3]
        lengths = ((x > 0) * torch.arange(1, 4)).amax(1).clamp(1)
        found, last = self.cells(pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False))
        if not self.padded:
            return torch.cat([*last], 1)
        found, _ = pad_packed_sequence(found, batch_first=True)
        return found.amax(1)


def routed(kind: type[nn.Module] = Routed) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), nn.Linear(WIDTH, 10))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "masks": routed,
    "counts": lambda: routed(Counted),
    "a length": lambda: nn.Sequential(Trimmed(), nn.Linear(64, 10)),
    "packed and padded again": lambda: nn.Sequential(Packed(nn.LSTM, True), nn.Linear(48, 10)),
    "packed": lambda: nn.Sequential(Packed(nn.GRU, False), nn.Linear(48, 10)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 2, "precision": "bf16-mixed"},
    "blocks computed again": {"activation_checkpointing": True},
}


WITHOUT_BLOCKS = ("a length", "packed and padded again", "packed")
CASES = [(n, h) for n in BUILDS for h in OPTIONS if h != "blocks computed again" or n not in WITHOUT_BLOCKS]
CASES.remove(("packed", "micro-batches"))


@pytest.mark.parametrize(("name", "how"), CASES)
def test_what_a_model_chooses_is_as_large_as_it_was_for_real(name: str, how: str) -> None:
    options, inputs = config(**OPTIONS[how]), batch()
    predicted = predict(BUILDS[name], inputs, options, prepare=setup, loss=LOSS)
    measured = measure(BUILDS[name], inputs, options, prepare=setup, loss=LOSS)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert not predicted.guessed


def test_a_loss_may_choose_too() -> None:
    def positive(model: Any, value: Any, target: Any) -> Any:
        kept = model(value)[value[:, 0] > 0.5]
        return (kept * kept).sum(), float(len(value))

    inputs = (torch.randn(SAMPLES, WIDTH), None)
    predicted, measured = (
        f(lambda: nn.Linear(WIDTH, 500), inputs, config(), prepare=setup, loss=positive) for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


def _predicted(build: Callable[[], nn.Module]) -> Prediction:
    return predict(build, batch(), config(), prepare=setup, loss=LOSS)


@pytest.mark.parametrize("limit", ["LARGEST", "WORK"])
def test_a_model_too_large_to_be_run_is_guessed_high(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Branches on masks are taken as well."""
    near = _predicted(routed)
    monkeypatch.setattr(trial, limit, 1)
    found = _predicted(routed)
    assert found.guessed
    assert found.peak_bytes > 1.5 * near.peak_bytes
    with pytest.raises(QtoolError, match=r"prediction: expected a step .*got 'aten\.bincount"):
        _predicted(lambda: routed(Counted))


def test_a_given_model_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), routed())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, state = batch(), torch.get_rng_state()
    predict(lambda: model, inputs, config(), prepare=setup, loss=LOSS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_is_run_once_for_several_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.memory.scratch import Scratch

    runs, tried = [], trial._tried
    monkeypatch.setattr(trial, "_tried", lambda *args: runs.append(1) or tried(*args))
    scratch = Scratch()
    for precision in ("32-true", "bf16-mixed"):
        predict(routed, batch(), config(precision=precision), prepare=setup, loss=LOSS, scratch=scratch)
    assert len(runs) == 1


def test_questions_that_have_one_answer_are_not_worth_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.isfinite().all()
            return super().forward(x)

    monkeypatch.setattr(trial, "_tried", lambda *args: pytest.fail("the model was run"))
    assert not _predicted(lambda: Careful(WIDTH, 10)).guessed
