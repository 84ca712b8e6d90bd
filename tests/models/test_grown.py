"""Buffers that a training leaves larger than the model has them: its weights open all the same, and others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import qtool
from qtool.errors import QtoolError
from qtool.models.grown import buffers_of, grow
from qtool.models.specs import load_weights

NET = """
import torch
from torch import nn

class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("last", None)
        self.register_buffer("mask", torch.ones(64), persistent=False)

    def forward(self, x):
        x = x.flatten(1) * self.mask
        if self.training:
            self.seen, self.last = torch.cat([self.seen, x.detach().mean(1)]), x.detach()[:1]
        return self.layer(x)
"""


def test_a_run_whose_buffers_have_grown_is_opened_again(small_data: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model, run = f"{tmp_path / 'net.py'}:Collecting", tmp_path / "run"
    first = qtool.train(model, small_data, out=run, epochs=1, device="cpu")
    again = qtool.train(model, small_data, out=run, epochs=1, device="cpu")
    assert len(first.model.seen) > 0
    assert torch.equal(again.model.seen, first.model.seen)
    assert torch.equal(again.model.last, first.model.last)
    x = torch.rand(2, 1, 8, 8)
    quantized = qtool.quantize(run, effort="fast")
    torch.testing.assert_close(quantized(x), again.model(x), rtol=0, atol=0.05)
    with pytest.raises(QtoolError, match=r"other shapes: seen \(\d+,\) where the model has \(0,\)"):
        qtool.train(model, small_data, weights=str(run / "model.safetensors"), epochs=1)


def test_a_run_of_another_architecture_is_refused_and_changes_nothing(small_data: str, tmp_path: Path) -> None:
    qtool.train(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), small_data, out=tmp_path, epochs=1, device="cpu")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    other.register_buffer("seen", torch.zeros(2))
    with pytest.raises(QtoolError, match=r"missing: seen; other shapes: 1\.bias"):
        load_weights(other, tmp_path)
    assert torch.equal(other.seen, torch.zeros(2))


def test_buffers_take_the_shapes_of_a_state_and_no_others() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model[0].register_buffer("late", None)
    model[0].register_buffer("mask", torch.ones(3), persistent=False)
    weight = model[0].weight
    grow(model, {"0.running_mean": torch.ones(5), "0.late": torch.ones(1), "0.weight": torch.ones(9)})
    shapes = {name: value if value is None else tuple(value.shape) for name, value in buffers_of(model).items()}
    assert shapes == {"0.running_mean": (5,), "0.running_var": (2,), "0.num_batches_tracked": (), "0.late": (1,)}
    assert model[0].weight is weight
