"""What a model cannot take is told in one line, at whatever pass it shows; what it can is made so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.errors import QtoolError


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.linear(self.table(ids).mean(1))
        return made


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(nodes)
        made: Tensor = self.second(torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]).relu())
        return made


KNOWN, UNKNOWN = torch.arange(40).reshape(8, 5), torch.full((8, 5), 90)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_inputs_of_a_type_that_the_capture_did_not_mind(dtype: torch.dtype) -> None:
    told = r"model 'Sequential' on 2 samples of the first batch: .* got RuntimeError: mat1 and mat2 .*; check the type"
    with pytest.raises(QtoolError, match=told):
        qtool.quantize(net(), [torch.ones(8, 8, dtype=dtype)])


def test_values_beyond_a_table_in_any_batch(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"2 samples of the first batch.* index out of range"):
        qtool.quantize(Words(), [UNKNOWN])
    with pytest.raises(QtoolError, match=r"calibration batch 1.* index out of range"):
        qtool.quantize(Words(), [KNOWN, UNKNOWN])
    quantized = qtool.quantize(Words(), [KNOWN])
    with pytest.raises(QtoolError, match=r"inputs: .* index out of range"):
        quantized(UNKNOWN)
    with pytest.raises(QtoolError, match=r"the samples: .* index out of range"):
        qtool.export(quantized, tmp_path, samples=[UNKNOWN])


def test_inputs_without_a_batch_axis_are_told_of_it() -> None:
    edges = torch.randint(5, 20, (2, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(QtoolError, match=r"samples along the first axis.* though it takes the whole; put a batch axis"):
        qtool.quantize(GraphNet(), [((torch.randn(20, 8), edges),)])


def test_samples_of_inference_mode_and_those_with_gradients_are_taken(tmp_path: Path) -> None:
    with torch.inference_mode():
        labelled = [(torch.randn(8, 8), torch.randint(0, 4, (8,)))]
    qtool.train(net(), labelled, epochs=1)
    quantized = qtool.quantize(net(), [batch for batch, _ in labelled])
    qtool.export(quantized, tmp_path, samples=[torch.randn(8, 8, requires_grad=True)])
