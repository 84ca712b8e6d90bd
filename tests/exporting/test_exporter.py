"""The exporter's shortcuts: the same file, node for node, as without them, and torch left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import nn
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from qtool.exporting import to_onnx
from qtool.form import QuantizedModel


def written(make: Callable[[], ir.Model]) -> bytes:
    return bytes(ir.serde.serialize_model(make()).SerializeToString())


def test_the_file_is_the_same_with_and_without(
    gated: tuple[QuantizedModel, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = gated
    makers = [lambda: to_onnx.quantized_to_onnx(quantized, 21)]
    if quantized.float_graph is not None:
        makers.append(lambda: to_onnx.float_to_onnx(quantized.float_graph, quantized.example, 21))
    quick = [written(make) for make in makers]
    monkeypatch.setattr(to_onnx, "quicker", contextlib.nullcontext)
    assert quick == [written(make) for make in makers]


def test_mixed_types_are_still_cast() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return x * n + 2

    example = (torch.randn(2, 3), torch.arange(6).reshape(2, 3))
    graph = torch.export.export(Mixed(), example).module(check_guards=False)
    model = to_onnx.float_to_onnx(graph, example, 21)
    assert next(iter(model.graph)).op_type == "Cast"


def test_torch_is_as_before_behind_the_block() -> None:
    owners = ((SimplePatternMatcher, "match"), (_fx_passes, "insert_type_promotion_nodes"))
    before = [vars(owner)[name] for owner, name in (*owners, (ONNXRegistry, "from_torchlib"))]
    with to_onnx.quicker():
        assert vars(SimplePatternMatcher)["match"] is not before[0]
    assert [vars(owner)[name] for owner, name in (*owners, (ONNXRegistry, "from_torchlib"))] == before
