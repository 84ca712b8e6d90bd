"""The exporter's shortcuts: the same file, node for node, as without them, and torch left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import nn
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from qtool.exporting import to_onnx
from qtool.form import QuantizedModel, quantize_nodes
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig
from qtool.runtimes.ort import OrtSession


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


def test_forms_that_one_graph_asks_for_are_not_there_for_the_next() -> None:
    pool, example = nn.AdaptiveAvgPool2d(2), torch.randn(2, 3, 5, 5)
    graphs = [float_form(pool, example, axes=axes) for axes in ((), (2, 3), ())]
    first, _, last = (written(lambda graph=graph: to_onnx.float_to_onnx(graph, example, 21)) for graph in graphs)
    assert first == last


def test_mixed_types_are_still_cast() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return x * n + 2

    example = (torch.randn(2, 3), torch.arange(6).reshape(2, 3))
    graph = torch.export.export(Mixed(), example).module(check_guards=False)
    model = to_onnx.float_to_onnx(graph, example, 21)
    assert next(iter(model.graph)).op_type == "Cast"


def test_a_view_may_read_what_lies_in_memory_otherwise_when_types_are_worked_out_anew() -> None:
    """As an attention's output does in T5 with open sequences: another kernel is taken for it then."""

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).reshape(2, 12) * n

    graph = torch.export.export(Turned(), (torch.randn(2, 3, 4), torch.arange(12))).graph_module
    (shaped,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.reshape.default)
    shaped.target = torch.ops.aten.view.default
    with to_onnx.quicker():
        _fx_passes.insert_type_promotion_nodes(graph)
    assert torch.ops.prims.convert_element_type.default in {node.target for node in graph.graph.nodes}


class Scaled(nn.Module):
    """Numbers of Python beside floats, as attention has, and beside integers, as positions are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids + 1) * 0.5).softmax(-1).mean(-1, keepdim=True) ** 2.0


def test_types_that_numbers_leave_as_they_are_are_not_worked_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (torch.arange(6).reshape(2, 3),)
    graph = torch.export.export(Scaled(), example).module(check_guards=False)
    plain = _fx_passes.insert_type_promotion_nodes
    inserted: list[object] = []
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", lambda g: (inserted.append(g), plain(g)))
    quick = written(lambda: to_onnx.float_to_onnx(graph, example, 21))
    assert not inserted
    monkeypatch.setattr(to_onnx, "quicker", contextlib.nullcontext)
    assert quick == written(lambda: to_onnx.float_to_onnx(graph, example, 21))
    assert inserted


def test_torch_is_as_before_behind_the_block() -> None:
    owners = ((SimplePatternMatcher, "match"), (_fx_passes, "insert_type_promotion_nodes"))
    before = [vars(owner)[name] for owner, name in (*owners, (ONNXRegistry, "from_torchlib"))]
    with to_onnx.quicker():
        assert vars(SimplePatternMatcher)["match"] is not before[0]
    assert [vars(owner)[name] for owner, name in (*owners, (ONNXRegistry, "from_torchlib"))] == before


class TwoHeads(nn.Module):
    """Two heads behind norms of their own that begin with the same numbers, as in LeViT and distilled DeiT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.stem(x).relu().mean((2, 3))
        first, second = (head(norm(features)) for norm, head in zip(self.norms, self.heads, strict=True))
        return (first + second) / 2


def test_two_units_of_equal_numbers_keep_a_quantizer_each() -> None:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    quantized = quantize(TwoHeads().eval(), QuantizeConfig(), example=x, calibration=[x])
    model = to_onnx.quantized_to_onnx(quantized, 21)
    found = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    assert len(found) == len(quantize_nodes(quantized.graph))
    assert all("unit_number" not in node.attributes for node in found)


class RootMeanSquareNorm(nn.Module):
    """A norm with an epsilon that is small, and not nothing, as Helium's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8)


def test_a_small_epsilon_is_no_zero_to_the_exporter(tmp_path: Path) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.0], [1e-5], [1e-3], [1.0]])
    graph = float_form(RootMeanSquareNorm(), x)
    to_onnx.save(to_onnx.float_to_onnx(graph, x, 21), tmp_path / "norm.onnx")
    (found,) = OrtSession(tmp_path / "norm.onnx").run({"x": x.numpy()})
    np.testing.assert_allclose(found, RootMeanSquareNorm()(x).numpy(), rtol=1e-5)


class Routed(nn.Module):
    """Two experts, each with its share of the rows, as in JetMoe, weighed by integers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long()
        order = chosen.argsort()
        parts = x[order].split(torch.stack([1 - chosen, chosen]).sum(1).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return done[order.argsort()] * (chosen[:, None] + 1)


def test_sizes_by_values_that_one_export_made_are_not_asked_of_the_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, 4), Routed().eval()
    graph = float_form(model, x)
    for _ in range(2):  # as the quantized graph's file and the float graph's, which share their sizes
        to_onnx.save(to_onnx.float_to_onnx(graph, x, 21), tmp_path / "routed.onnx")
        (found,) = OrtSession(tmp_path / "routed.onnx").run({"x": x.flip(0)[:5].numpy()})
        np.testing.assert_allclose(found, model(x.flip(0)[:5]).detach().numpy(), rtol=1e-5, atol=1e-6)
