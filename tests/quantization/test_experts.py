"""A mixture of experts that share tokens out by a mask: each reads as many rows as the data decides, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Experts(nn.Module):
    """Each row goes to the one expert that the gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            made[mine] = expert(x[mine])
        return made


@pytest.mark.parametrize(
    "options", [{}, {"algorithms": ("gptq",), "ranges": "output"}, {"algorithms": ("adaround",), "rounding_steps": 20}]
)
def test_experts_are_integer_and_keep_their_own_biases(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Experts().eval()
    batches = [torch.randn(4, 16) for _ in range(8)]  # too few rows for each expert to get one every time
    with torch.no_grad():
        assert any(len(net.gate(batch).argmax(-1).unique()) < 3 for batch in batches)
    form = quantize(net, QuantizeConfig(**options), example=batches[0], calibration=batches)
    assert {unit.name for unit in form.plan.integer_units} == {
        "gate", *(f"experts.{i}.{j}" for i in range(3) for j in (0, 2))
    }  # fmt: skip
    assert any(note.startswith("no pass corrects layers that read as many rows") for note in form.plan.notes)
    with torch.no_grad():
        for batch in batches:
            assert torch.isfinite(form(batch)).all()
            assert float((form(batch) - net(batch)).abs().max()) < 0.05
    exported = export(form, tmp_path, ExportConfig(), samples=batches)
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
