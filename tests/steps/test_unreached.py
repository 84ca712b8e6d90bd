"""Parameters that no gradient reaches are told once, by name; those that some steps leave out are not."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtool.errors import QtoolError, QtoolWarning
from qtool.recipe import TrainConfig
from qtool.steps.loop import fit
from qtool.steps.order import Batches
from qtool.tasks import load_task
from qtool.training.techniques import setup


class Net(nn.Module):
    """Layers of which each step calls one in turn, and a head for which there is no loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.out, self.spare = nn.Linear(4, 3), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return self.out(self.layers[self.calls % 2](x))


BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


def run(model, steps=10, **options):
    config = TrainConfig(device="cpu", epochs=1, batch_size=4, max_steps=steps, **options)
    data = SimpleNamespace(train=Batches([BATCH] * 12), validation=None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with setup(model, config) as made:
            fit(model, data, load_task("classification"), config, setup=made)
    return [str(warning.message) for warning in found if warning.category is QtoolWarning]


@pytest.mark.parametrize(
    "options", [{}, {"step_in_backward": True, "grad_clip": None}, {"micro_batches": 2}, {"strategy": "fsdp"}]
)
def test_what_no_gradient_reaches_is_told_once(options):
    before = Net()
    told = run(model := Net(), **options)
    assert [line for line in told if "reached" in line] == [
        "training: no gradient has reached spare.weight, spare.bias in the first 8 steps: what the loss does not "
        "depend on stays as it came"
    ]
    assert torch.equal(model.spare.weight, before.spare.weight)
    assert not torch.equal(model.layers[0][0].weight, before.layers[0][0].weight)


def test_a_short_run_tells_it_at_its_end():
    assert "reached layers.0.0.weight, layers.0.0.bias, spare.weight and 1 more in the first 1 step" in run(Net(), 1)[0]


def test_frozen_parameters_are_not_told():
    model = Net()
    model.spare.requires_grad_(False)
    assert not run(model)


def test_a_model_that_computes_without_gradients_is_told_and_not_its_task():
    class Still(Net):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(QtoolError, match=r"^model: expected outputs that depend on what is trained; got outputs"):
        run(Still())


class Late(nn.Module):
    """A head that is as wide as its first input, made when that comes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), None

    def forward(self, x):
        x = self.body(x).relu()
        if self.head is None:
            self.head = nn.Linear(x.shape[1], 3)
        return self.head(x)


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True, "grad_clip": None}, {"strategy": "fsdp"}])
def test_parameters_that_a_forward_pass_makes_are_refused(options):
    """No optimizer has them: the head would stay as it was drawn."""
    with pytest.raises(QtoolError, match=r"^model: .* first step; got head\.weight, head\.bias, which a forward pass"):
        run(Late(), **options)


def test_parameters_that_a_forward_pass_has_made_by_then_are_trained():
    (model := Late())(BATCH[0])
    before = model.head.weight.clone()
    assert not run(model)
    assert not torch.equal(model.head.weight, before)
