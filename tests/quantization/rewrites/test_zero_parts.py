"""Zeros at an end of what is joined or written into are a padding: the same values, integers between integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture


class Shifted(nn.Module):
    """Two convolutions with a temporal shift between them, written into zeros as TSM is (arXiv 1811.08383)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3)

    def forward(self, frames: Tensor) -> Tensor:
        batch, times = frames.shape[:2]
        x = self.first(frames.flatten(0, 1)).relu().unflatten(0, (batch, times))
        y = torch.zeros_like(x)
        y[:, :-1, :4] = x[:, 1:, :4]
        y[:, 1:, 4:8] = x[:, :-1, 4:8]
        y[:, :, 8:] = x[:, :, 8:]
        return torch.as_tensor(self.last(y.flatten(0, 1)).mean((2, 3)).unflatten(0, (batch, times)))


class Later(nn.Module):
    """Zeros before, behind, on both sides of what is kept, and between it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 2, x.shape[2])
        parts = {
            "before": [zeros, x],
            "behind": [x, torch.zeros_like(x)],
            "around": [zeros, x, x.sin(), zeros[:, :1], zeros],
            "between": [x, zeros, x],
            "alone": [zeros, zeros],
        }
        return torch.cat(parts[self.where], 1)


@pytest.mark.parametrize(("where", "pads"), [("before", 1), ("behind", 1), ("around", 1), ("between", 0), ("alone", 0)])
def test_zeros_at_an_end_of_a_concatenation_are_a_padding(where: str, pads: int) -> None:
    model, x = Later(where), torch.randn(3, 5, 4)
    graph = capture(model, x)
    assert sum(node.target is aten.constant_pad_nd.default for node in graph.graph.nodes) == pads
    assert torch.equal(graph(x), model(x))


def test_a_temporal_shift_written_into_zeros_runs_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shifted().eval()
    batches = [(torch.randn(4, 4, 3, 12, 12), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
    quantized = qtool.quantize(model, batches, effort="fast")
    assert {unit.name for unit in quantized.plan.units if not unit.integer} == set()
    exported = qtool.export(quantized, tmp_path, samples=batches, baselines=None)
    kernels = next(gate for gate in exported.gates if gate["name"] == "coverage")["details"]["kernels"]
    assert kernels["DequantizeLinear"] == 1, "of the answer alone"
