from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from qtool.errors import QtoolError
from qtool.memory import measure
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.tasks import Classification
from qtool.training.techniques import setup


def block(at: int, size: int, device: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: "[memory]", start_ns=lambda: at, nbytes=lambda: size, device_type=lambda: device
    )


def test_a_gpu_s_blocks_are_not_counted_as_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler tells of both."""
    told = [block(2, -4, DeviceType.CPU), block(1, 700, DeviceType.CUDA), block(0, 4, DeviceType.CPU)]
    profiled = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: told))
    monkeypatch.setattr(measure, "profile", lambda **_: nullcontext(profiled))
    assert measure.allocations(lambda: "made") == ([4, -4], "made")


def test_a_measurement_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    seen = measure.allocations(lambda: os.environ["KINETO_LOG_LEVEL"])[1]
    assert (seen, os.environ.get("KINETO_LOG_LEVEL")) == ("99", None)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    seen = measure.allocations(lambda: os.environ["KINETO_LOG_LEVEL"])[1]
    assert (seen, os.environ["KINETO_LOG_LEVEL"]) == ("1", "1")


def test_importing_a_module_that_measures_changes_no_environment() -> None:
    code = "import os; told = dict(os.environ); import qtool.memory.predict, qtool.memory.measure"
    done = [sys.executable, "-c", f"{code}; assert 'KINETO_LOG_LEVEL' not in set(os.environ) - set(told)"]
    subprocess.run(done, check=True, env={k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"})


@pytest.mark.parametrize(
    ("value", "rate", "told"),
    [
        (1.0, 1e30, r"^measured step 2: expected a finite loss; got nan at .*1e\+30, .*; lower --learning-rate$"),
        (float("nan"), 0.1, r"^measured step 1: expected .*, first non-finite in the inputs of .*; correct the data$"),
    ],
)
def test_a_loss_that_is_not_finite_is_told_with_its_cause(value: float, rate: float, told: str) -> None:
    batch = torch.full((8, 4), value), torch.arange(8) % 3
    config = TrainConfig(device="cpu", learning_rate=rate, grad_clip=None)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))

    with pytest.raises(QtoolError, match=told):
        measure.measure(build, batch, config, prepare=setup, loss=task_loss(Classification()))
