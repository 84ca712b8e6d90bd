"""A linear layer whose results are clipped to a range without 0 runs in integers, and the file computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, rewritten_by, run
from torch import Tensor, nn

from qtool.exporting.passes import clips_apart
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

CLIPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "float behind": lambda y: y.clamp(0.1, 5.0) * 2,
    "the end": lambda y: y.clamp(0.1, 5.0),
    "a logarithm of a mean": lambda y: y.clamp(min=0.1).mean(-1).log(),
    "below 0": lambda y: y.clamp(max=-0.1).exp(),
    "turned": lambda y: y.unflatten(1, (4, 2)).transpose(1, 2).clamp(min=0.1).transpose(1, 2) * 2,
}


class Clipped(nn.Module):
    """Two linear layers, the second of which is clipped."""

    def __init__(self, clip: Callable[[Tensor], Tensor], *, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.clip = nn.Linear(16, 32), nn.Linear(32, 8, bias=bias), clip

    def forward(self, x: Tensor) -> Tensor:
        return self.clip(self.b(self.a(x).relu()))


@pytest.mark.parametrize(("name", "bias"), [*((name, True) for name in CLIPPED), ("float behind", False)])
def test_a_layer_whose_results_are_clipped_to_a_range_without_zero_runs_in_integers(
    name: str, bias: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = Clipped(CLIPPED[name], bias=bias).eval(), torch.randn(16, 16)
    quantized = quantize(net, QuantizeConfig(effort="fast"), example=x, calibration=[x])
    assert {unit.name: unit.integer for unit in quantized.plan.units if unit.kind == "linear"} == {"a": True, "b": True}
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[x])
    assert {gate["passed"] for gate in exported.gates} <= {True, None}


def product() -> onnx.ModelProto:
    """A linear layer that reads integers, and a Clip before more that is float."""
    b = Builder()
    y = b.op("Gemm", b.pair(b.input("x", [3, 8]), 0.02, 128), b.weight(4, 8), transB=1)
    return b.model(b.op("Exp", b.op("Clip", y, b.constant(0.1, np.float32), b.constant(2.0, np.float32))))


def test_the_runtime_needs_it_and_no_number_changes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    count, apart = rewritten_by(clips_apart.apply, product())
    (wanted, kinds), (found, others) = (run(model, {"x": x}, tmp_path) for model in (product(), apart))
    assert count == 1
    assert "QGemm" not in kinds  # without this, the pass has no reason to be
    assert "QGemm" in others
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    onnx.checker.check_model(apart, full_check=True)


def test_a_clip_that_ends_the_graph_stays_as_it_is() -> None:
    b = Builder()
    y = b.op("Gemm", b.pair(b.input("x", [3, 8]), 0.02, 128), b.weight(4, 8), transB=1)
    assert rewritten_by(clips_apart.apply, b.model(b.op("Relu", y)))[0] == 0


@pytest.mark.parametrize("read", ["float", "integers"])
def test_layers_in_float_are_left_alone(read: str) -> None:
    b = Builder()
    x = b.input("x", [3, 8])
    weight = b.constant(np.ones((8, 4), np.float32)) if read == "integers" else b.weight(8, 4)
    model = b.model(
        b.op("Exp", b.op("Relu", b.op("MatMul", b.pair(x, 0.02, 128) if read == "integers" else x, weight)))
    )
    assert rewritten_by(clips_apart.apply, model)[0] == 0
