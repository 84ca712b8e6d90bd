"""Values that follow from constants are real ones under a prediction; what weights and batches decide is not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from qtool.memory.fakes import answered
from qtool.memory.known import LARGEST, known
from qtool.memory.measure import measure
from qtool.memory.predict import predict
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.tasks import load_task
from qtool.training.techniques import setup

LOSS = task_loss(load_task("classification"))
REAL = torch.tensor([7, 7])
"""Made before any mode is on, as batches are."""


@pytest.fixture
def fake() -> Iterator[Any]:
    """What makes a fake tensor of a real one; fake tensors are known in the test."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, answered():
        yield mode.from_tensor


@pytest.mark.usefixtures("fake")
def test_numbers_that_follow_from_constants_are_what_they_are() -> None:
    rates = torch.linspace(0, 0.3, 4)
    assert isinstance(rates, FakeTensor)
    assert rates.tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    widths = (torch.arange(5) * 24.0 + 24).div(48).round().int() * 8
    assert widths.tolist() == [0, 8, 16, 16, 16]
    values, counts = widths.unique(return_counts=True)
    assert isinstance(values, FakeTensor)
    assert (values.tolist(), counts.tolist()) == ([0, 8, 16], [1, 1, 3])
    assert torch.equal(values, torch.tensor([0, 8, 16]))
    assert widths.nonzero().shape == (4, 1)


@pytest.mark.usefixtures("fake")
def test_writing_in_place_and_through_views_is_followed() -> None:
    table = torch.zeros(2, 3)
    table[1, 1:] += 5
    table[0].fill_(2)
    assert table.tolist() == [[2, 2, 2], [0, 5, 5]]


def test_what_data_and_chance_decide_is_not_known(fake: Any) -> None:
    batch = fake(REAL)
    table = torch.zeros(4)
    row = table[:2]
    assert batch.tolist() == [1, 1]
    row.copy_(batch)
    assert known(row) is None
    assert known(table) is None, "a view of it was written"
    assert known(torch.zeros(3).uniform_()) is None
    assert known(torch.empty(3)) is None
    assert known(torch.zeros(LARGEST + 1)) is None
    assert known(torch.zeros(LARGEST)) is not None


def test_real_tensors_are_read_as_they_are_and_not_written_by_what_follows() -> None:
    real = torch.tensor([3, 5])
    with FakeTensorMode(allow_non_fake_inputs=True), answered():
        total = real + 1
        total.add_(1)
        real.view(2)[:1].expand(2).contiguous().zero_()
        assert total.tolist() == [5, 7]
        torch.zeros(2).add_(real)
    assert real.tolist() == [3, 5]


class Stages(nn.Module):
    """Its depth comes from tensors, as RegNet's does, and its forward pass splits by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        depth = int(torch.arange(7).clamp(max=5).unique().numel())
        rates = torch.linspace(0, 0.1, depth).tolist()
        self.blocks = nn.Sequential(*(nn.Linear(96, 96) if r < 0.5 else nn.Identity() for r in rates))
        self.heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(32, 10)])
        self.register_buffer("parts", torch.tensor([64, 32]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks(x).split(self.parts.tolist(), dim=1)
        return self.heads[0](first) + self.heads[1](second)


@pytest.mark.parametrize("made", [False, True])
def test_a_model_that_computes_its_own_sizes_is_predicted(made: bool) -> None:
    model = Stages()
    build = (lambda: model) if made else Stages
    batch = torch.randn(256, 96), torch.zeros(256, dtype=torch.int64)
    config = TrainConfig(device="cpu", batch_size=256)
    predicted = predict(build, batch, config, prepare=setup, loss=LOSS)
    assert predicted.parts["parameters"] == sum(p.nbytes for p in model.parameters())
    assert model.parts.tolist() == [64, 32]
    measured = measure(Stages, batch, config, prepare=setup, loss=LOSS)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_a_device_that_is_asked_for_is_seldom_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all that reached the fake mode asked for one."""
    seen: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def watched(self: FakeTensorMode, func: Any, *args: Any) -> Any:
        seen.append(func)
        return dispatch(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", watched)
    config = TrainConfig(device="cpu", batch_size=4)
    predict(lambda: nn.Linear(4, 2), (torch.randn(4, 4), torch.arange(4) % 2), config, prepare=setup, loss=LOSS)
    assert seen.count(torch.ops.prim.device.default) < len(seen) / 5
