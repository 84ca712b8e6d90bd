"""Copies of a model in a group of one process: what does not depend on how many there are."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import group_runs
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.recipe import TrainConfig
from qtool.steps.setup import plain, trained
from qtool.steps.step import Step
from qtool.system import processes
from qtool.system.launcher import launch
from qtool.training import compiling, replicas

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("warm_launches"),
]


class Half(nn.Module):
    """A model with a layer that is not used unless ``whole``; with ``aside``, for an output that no loss reads."""

    def __init__(self, whole: bool, aside: bool = False) -> None:
        super().__init__()
        self.norm, self.used, self.other = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.whole, self.aside = whole, aside
        self.register_buffer("repeated", torch.ones(1).expand(3), persistent=False)

    def forward(self, x: Tensor) -> object:
        y = self.used(self.norm(x)) * self.repeated
        if self.aside:
            return SimpleNamespace(logits=y, aside=self.other(x))
        return y + self.other(x) if self.whole else y


def loss(model: nn.Module, value: Tensor, target: Tensor) -> tuple[Tensor, float]:
    output = model(value)
    return nn.functional.cross_entropy(getattr(output, "logits", output), target, reduction="sum"), float(len(target))


@pytest.mark.parametrize(("whole", "aside"), [(True, False), (False, False), (True, True)])
def test_a_layer_that_the_loss_does_not_depend_on_is_not_waited_for(whole: bool, aside: bool) -> None:
    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    model = Half(whole, aside)
    alone = copy.deepcopy(model)
    config = TrainConfig(device="cpu", batch_size=6)
    with processes.joined(torch.device("cpu")), plain(model, config) as setup, plain(alone, config) as other:
        replicas.apply(setup, x[:2])
        steps = [Step(s, s.make_optimizer(trained(s.model)), loss) for s in (setup, other)]
        before = torch.get_rng_state()
        losses = [[step(x, target, 0.1) for _ in range(3)] for step in steps]
        assert isinstance(setup.replica, replicas.Replica)
        assert setup.replica.inner is not None
        assert setup.replica.inner.find_unused_parameters is (aside or not whole)
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] < losses[0][0]
    assert model.norm.num_batches_tracked == 3
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


class Now(nn.Linear):
    """A second layer has a part in every other step."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.second, self.count = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) + (self.second(x) if self.count % 2 else 0)


def test_a_layer_that_some_steps_leave_out_is_told() -> None:
    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with processes.joined(torch.device("cpu")), plain(Now(), TrainConfig(device="cpu", batch_size=6)) as setup:
        replicas.apply(setup, x[:2])
        step = Step(setup, setup.make_optimizer(trained(setup.model)), loss)
        step(x, target, 0.1)
        with pytest.raises(QtoolError, match=r"depends on the same parameters in every step.*--strategy fsdp"):
            [step(x, target, 0.1) for _ in range(2)]


def test_the_look_at_a_model_that_is_compiled_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compiler(graph: object, inputs: object) -> object:
        compiled.append(1)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options: real(function, backend=compiler))
    config, target = TrainConfig(device="cpu", compile=True), torch.tensor([0, 1, 2])
    for whole in (True, False):
        with plain(Half(whole), config) as setup:
            compiling.apply(setup, None)
            assert replicas._leaves_some_out(setup.model, loss, torch.randn(3, 4), target) is not whole
    assert not compiled


def test_a_last_batch_that_is_too_small_for_batch_norm_is_told_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"on the one sample of a batch of 2 that is left to a process.*--batch-size"):
        launch(group_runs.left_alone, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["True"] * 2


def test_buffers_are_agreed_on_whatever_memory_they_have(tmp_path: Path) -> None:
    launch(_agree, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["[0.0, 1.0, 2.0, 3.0, 7.0, 7.0]"] * 2


def _agree(folder: Path) -> None:
    with processes.joined(torch.device("cpu")):
        rank = processes.rank()
        model = nn.Module()
        model.register_buffer("turned", (torch.arange(4.0).view(2, 2) + 10 * rank).t())
        model.register_buffer("repeated", torch.full((1,), 7.0).expand(2))
        processes.agree_on_buffers(model)
        values = [*model.turned.t().flatten().tolist(), *model.repeated.tolist()]
        (folder / str(rank)).write_text(str(values))
