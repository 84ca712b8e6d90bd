"""Copies of a model in a group of one process: what does not depend on how many there are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from qtool import processes
from qtool.loop import task_loss
from qtool.recipe import TrainConfig
from qtool.step import Step, plain, trained
from qtool.tasks import load_task
from qtool.training import compiling, replicas

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Half(nn.Module):
    """A model with a layer that its forward pass does not use, unless ``whole``."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.norm, self.used, self.other, self.whole = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 3), whole

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(self.norm(x))
        return y + self.other(x) if self.whole else y


@pytest.mark.parametrize("whole", [True, False])
def test_a_layer_that_is_not_used_is_not_waited_for(whole: bool) -> None:
    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    model = Half(whole)
    with processes.joined(torch.device("cpu")), plain(model, TrainConfig(device="cpu", batch_size=6)) as setup:
        replicas.apply(setup, x[:2])
        assert setup.replica is not None
        assert setup.replica.find_unused_parameters is not whole
        assert model.norm.num_batches_tracked == 0
        step = Step(setup, setup.make_optimizer(trained(model)), task_loss(load_task("classification")))
        losses = [step(x, target, 0.1) for _ in range(3)]
    assert losses[2] < losses[0]


def test_the_look_at_a_model_that_is_compiled_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(graph: object, inputs: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    config = TrainConfig(device="cpu", compile=True)
    for whole in (True, False):
        with processes.joined(torch.device("cpu")), plain(Half(whole), config) as setup:
            compiling.apply(setup, None)
            replicas.apply(setup, torch.randn(2, 4))
            assert setup.replica is not None
            assert setup.replica.find_unused_parameters is not whole
