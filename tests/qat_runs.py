"""A small net trained, and fine-tuned through fake-quantizers by either engine: what tests of QAT begin with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qtool.form import QuantizedModel
from qtool.quantization.capturing.float_form import FloatForms
from qtool.quantization.qat.fine_tune import QatHooks
from qtool.quantization.stage import quantize
from qtool.recipe import QatConfig, QuantizeConfig, TrainConfig
from qtool.steps.loop import fit
from qtool.tasks import Classification
from qtool.training.techniques import setup

ENGINES = ("pt2e", "torch.ao")

forms = functools.cache(FloatForms)
"""The net captured once in evaluation form for all that is trained here from it; nothing changes it."""


class Net(nn.Module):
    """Convolution, batch-norm, ReLU; a residual sum; dropout before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.dropout(self.flatten(self.pool(self.relu(x + self.second(x))))))


def samples(count: int, seed: int) -> TensorDataset:
    """8×8 images of four classes: a bright quarter in noise."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.arange(count) % 4
    x = torch.randn(count, 1, 8, 8, generator=draw)
    for image, label in zip(x, target.tolist(), strict=True):
        image[0, 4 * (label // 2) :][:4, 4 * (label % 2) :][:, :4] += 0.5
    return TensorDataset(x, target)


DATA = SimpleNamespace(train=samples(192, 0), validation=None)
TRAIN, TEST = DATA.train.tensors[0], samples(512, 1).tensors[0]
SAMPLES: dict[str, Any] = {"example": TRAIN[:2], "calibration": [TRAIN]}


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    fit(model, DATA, Classification(), TrainConfig(epochs=6, batch_size=32, learning_rate=5e-3, device="cpu"))
    return model.eval()


def config(**options: Any) -> QatConfig:
    return QatConfig(**({"epochs": 2, "batch_size": 32, "device": "cpu", "learning_rate": 1e-3} | options))


class Watch(QatHooks):
    """The hooks that were handed in, with a note of the graph's state after each step's freezing."""

    def __init__(self, hooks: QatHooks) -> None:
        super().__init__(hooks.config, hooks.switch)
        self.seen: list[dict[str, Tensor]] = []

    def before_step(self, model: nn.Module, step: int, total: int) -> None:
        super().before_step(model, step, total)
        self.seen.append({name: value.detach().clone() for name, value in model.state_dict().items()})


def fine_tune(tuning: QatConfig, kept: dict[str, Any] | None = None, **more: Any) -> Callable[..., Any]:
    """What quantize calls to train; ``kept`` takes the graph and the hooks."""

    def run(graph: nn.Module, hooks: QatHooks, loss_fn: Any = None) -> Any:
        watch = Watch(hooks)
        if kept is not None:
            kept.update(graph=graph, hooks=watch)
        with setup(graph, tuning, TRAIN[:2]) as made:
            history = fit(graph, DATA, Classification(), tuning, setup=made, hooks=watch, loss_fn=loss_fn, **more)
        if kept is not None:
            with torch.no_grad():
                kept.update(output=graph(TEST), history=history)
        return history

    return run


def qat(
    model: nn.Module, engine: str, tuning: QatConfig, kept: dict[str, Any] | None = None, **more: Any
) -> QuantizedModel:
    return quantize(
        model, QuantizeConfig(mode="qat", engine=engine), **SAMPLES, tuning=tuning,
        qat=fine_tune(tuning, kept, **more), forms=forms(model),
    )  # fmt: skip


class Killed(Exception):
    pass
