"""The moving average of weights against its sum written out, and its place among the hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qtool.errors import UsageError
from qtool.quantization.qat.averaging import Average
from qtool.quantization.qat.fine_tune import check_tuning
from qtool.recipe import QatConfig


def test_the_average_is_the_weighted_sum_of_all_weights_so_far() -> None:
    model, average = nn.Linear(1, 1, bias=False), Average(0.8)
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(30, generator=draw).tolist()
    wanted = values[0]
    for step, value in enumerate(values):
        nn.init.constant_(model.weight, value)
        average.update(model, step)
        average.update(model, step)  # seen already
        decay = min(0.8, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * value if step else wanted
    assert average.step == 29
    average.put(model)
    assert float(model.weight.detach()) == pytest.approx(wanted, rel=1e-5)


def test_it_comes_back_from_its_state() -> None:
    model, average = nn.Linear(2, 2), Average(0.5)
    average.update(model, 0)
    again = Average(0.5)
    again.load_state_dict(average.state_dict())
    for one in (average, again):
        one.update(model, 1)
    assert all(torch.equal(average.values[name], again.values[name]) for name in average.values)


def test_before_any_step_nothing_is_put() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    Average(0.9).put(model)
    assert torch.equal(model.weight, before)


def test_an_average_and_the_best_epoch_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--ema: expected the average of all steps or the best epoch"):
        check_tuning(QatConfig(ema=0.99, early_stopping=2))
