"""Bags over a matrix of indices are lookups: the same numbers as torch's own, and a table of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

ROWS, WIDTH = 300, 8


class Bag(nn.Module):
    """A bag of words, weighed or not, and a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(ROWS, WIDTH, **options), nn.Linear(WIDTH, 3)
        with torch.no_grad():
            self.words.weight[0] = 5.0  # what stands for padding must not count

    def forward(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.head(self.words(ids, per_sample_weights=weights))


class Begun(nn.Module):
    """Bags whose beginnings are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, WIDTH)

    def forward(self, ids: Tensor, begins: Tensor) -> Tensor:
        return self.words(ids, begins)


def indices(words: int, batch: int = 6) -> Tensor:
    ids = torch.randint(0, ROWS, (batch, words), generator=torch.Generator().manual_seed(words))
    ids[0], ids[1, 0] = 0, 0  # a bag of padding alone, and one with some
    return ids


def operators(model: nn.Module, *inputs: Tensor) -> set[Any]:
    graph = capture(model.eval(), inputs)
    for rows in (len(inputs[0]), 1, 3):
        given = [value[:rows] for value in inputs]
        torch.testing.assert_close(graph(*given), model(*given))
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("words", [1, 4])
@pytest.mark.parametrize("options", [
    {"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"mode": "sum", "padding_idx": 0},
    {"mode": "mean", "padding_idx": 0},
])  # fmt: skip
@torch.no_grad()
def test_it_is_a_lookup_and_a_reduction(options: dict[str, Any], words: int) -> None:
    torch.manual_seed(0)
    found = operators(Bag(**options), indices(words))
    assert aten.embedding.default in found
    assert aten.embedding_bag.padding_idx not in found


@pytest.mark.parametrize("padding", [None, 0])
@torch.no_grad()
def test_words_are_weighed(padding: int | None) -> None:
    torch.manual_seed(0)
    found = operators(Bag(mode="sum", padding_idx=padding), indices(4), torch.randn(6, 4))
    assert aten.embedding_bag.padding_idx not in found


@torch.no_grad()
def test_a_maximum_that_passes_over_padding_and_bags_of_other_sizes_stay() -> None:
    assert aten.embedding_bag.padding_idx in operators(Bag(mode="max", padding_idx=0), indices(4))
    graph = capture(Begun().eval(), (torch.arange(12), torch.arange(0, 12, 3)))
    assert aten.embedding_bag.padding_idx in {node.target for node in graph.graph.nodes}


def test_the_table_is_bytes_and_no_loop_is_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = indices(4, 16)
    form = quantize(Bag(mode="mean").eval(), QuantizeConfig(), example=ids, calibration=[ids])
    exported = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[ids])
    assert {gate["passed"] for gate in exported.gates} == {True}
    for path in exported.files.values():
        assert "Loop" not in {node.op_type for node in onnx.load(str(path)).graph.node}
    assert exported.files["int8"].stat().st_size < 0.6 * exported.files["fp32"].stat().st_size
