"""The quantize stage's options: those of one config, and those that two share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qtool
from qtool.errors import UsageError
from qtool.recipe import QatConfig
from qtool.stages.quantization import _quantize_configs


def test_a_device_that_is_named_is_that_of_training_too() -> None:
    config, tuning = _quantize_configs(None, None, {"mode": "qat", "device": "cuda:1", "seed": 3})
    assert (config.device, config.seed) == ("cuda:1", 3)
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cuda:1", 3)
    config, tuning = _quantize_configs(None, QatConfig(device="cpu", seed=5), {"mode": "qat", "device": "cuda"})
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cpu", 5)
    config, tuning = _quantize_configs(None, None, {"mode": "qat"})
    assert tuning is not None
    assert (config.device, tuning.device) == ("cpu", "auto")


def test_options_of_training_that_exclude_each_other_are_refused_before_anything_is_calibrated() -> None:
    told: list[str] = []
    images = TensorDataset(torch.randn(8, 1, 4, 4), torch.zeros(8).long())
    with pytest.raises(UsageError, match="--step-in-backward: expected whole batches"):
        qtool.quantize(
            nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), {"train": images, "test": images}, mode="qat",
            micro_batches=2, step_in_backward=True, progress=told.append,
        )  # fmt: skip
    assert not told


def test_a_loader_that_shuffles_is_read_in_one_order_by_every_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    images = torch.randn(64, 1, 8, 8)
    loader = DataLoader(TensorDataset(images), 8, shuffle=True)
    torch.manual_seed(1)
    kept = list(loader)
    torch.manual_seed(1)
    found, expected = (qtool.quantize(model.eval(), data, algorithms=["gptq"]) for data in (loader, kept))
    with torch.no_grad():
        assert torch.equal(found(images), expected(images))


def test_threads_that_quantize_and_export_at_once_take_turns(tmp_path: Path) -> None:
    def made(seed: int) -> bool:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
        images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        exported = qtool.export(qtool.quantize(model, [images]), tmp_path / str(seed), samples=[images])
        return all(gate["passed"] for gate in exported.gates)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(made, range(3)))
