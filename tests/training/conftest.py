"""What the tests of the techniques train: a small transformer and a small convolutional net, and steps by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from technique_nets import convolutions, transformer
from torch import nn

from qtool.recipe import TrainConfig
from qtool.steps.step import Step
from qtool.training.techniques import setup

NETS = {"transformer": (transformer, (16,)), "convolutions": (convolutions, (1, 8, 8))}


def loss(model: Any, value: Any, target: Any) -> tuple[torch.Tensor, float]:
    return nn.functional.cross_entropy(model(value).float(), target, reduction="sum"), float(len(target))


@pytest.fixture(params=sorted(NETS))
def net(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run_steps() -> Callable[..., SimpleNamespace]:
    """``run_steps(net, count=4, **options)``: trains for a few steps; the model, the losses, the step and the setup."""

    def run(net: str, count: int = 4, prepare: Any = None, **options: Any) -> SimpleNamespace:
        torch.manual_seed(0)
        build, shape = NETS[net]
        model = build().train()
        values = {"device": "cpu", "batch_size": 16, "learning_rate": 0.01, "grad_clip": None, "channels_last": False}
        made = setup(model, TrainConfig(**(values | options)), torch.randn(2, *shape))
        if prepare is not None:
            prepare(made)
        step = Step(made, made.make_optimizer(list(model.parameters())), loss)
        torch.manual_seed(1)
        rate = made.config.learning_rate
        losses = [step(torch.randn(16, *shape), torch.randint(0, 4, (16,)), rate) for _ in range(count)]
        return SimpleNamespace(model=model, losses=losses, step=step, setup=made)

    return run


@pytest.fixture
def same_state() -> Callable[[nn.Module, nn.Module], bool]:
    """Whether two models have bit-equal parameters and buffers."""

    def same(a: nn.Module, b: nn.Module) -> bool:
        pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
        return all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in pairs)

    return same
