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


class Positions(nn.Module):
    """A language model whose positions are a table of 8, looked up by counting, as GPT-2's are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(256, 8), nn.Embedding(8, 8), nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
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


@pytest.mark.parametrize("mode", ["ptq", "qat"])
def test_sequences_longer_than_a_models_positions(tmp_path: Path, mode: str) -> None:
    """Of a captured graph they are a constant, which is computed before the graph is compared with the model."""
    (tmp_path / "t.txt").write_text("some words " * 9)
    options = {"task": "language-modelling", "mode": mode, "effort": "fast"}
    with pytest.raises(QtoolError, match=r"index out of range in self; give indices .* \(--data text:FILE:LENGTH\)"):
        qtool.quantize(Positions(), f"text:{tmp_path / 't.txt'}:9", **options)


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
