"""What random numbers decide is left out of the gates, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import ContractError
from qtool.exporting import stage
from qtool.exporting.drawn import drawn
from qtool.exporting.gates import parity
from qtool.exporting.stage import ExportResult, export
from qtool.exporting.to_onnx import quantized_to_onnx
from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))


class Sampling(nn.Module):
    """A variational autoencoder that samples in evaluation too; ``all_random`` gives the sample alone."""

    def __init__(self, all_random: bool = False) -> None:
        super().__init__()
        self.encode, self.mean = nn.Sequential(nn.Linear(12, 16), nn.ReLU()), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.all_random = all_random

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        mean = self.mean(self.encode(x))
        made = self.decode(mean + 0.3 * torch.randn_like(mean))
        return made if self.all_random else (made, mean)


def form_of(all_random: bool = False) -> QuantizedModel:
    torch.manual_seed(0)
    return quantize(Sampling(all_random).eval(), QuantizeConfig(), example=X, calibration=[X])


def gates(result: ExportResult) -> dict[str, tuple[bool | None, str]]:
    return {gate["name"]: (gate["passed"], gate["found"]) for gate in result.gates}


def test_the_rest_is_judged(tmp_path: Path) -> None:
    found = gates(export(form_of(), tmp_path, ExportConfig(baselines=None), samples=[X]))
    passed, told = found["unit parity"]
    assert passed
    assert "3 units" in told
    assert "1 more read random numbers and are not compared" in told
    assert found["end-to-end parity"][0]
    assert found["coverage"][0]
    assert found["integer reference"] == (None, "not run: it evaluates no RandomNormalLike")


def test_where_all_is_random_the_end_is_not_compared(tmp_path: Path) -> None:
    found = gates(export(form_of(all_random=True), tmp_path, ExportConfig(baselines=None), samples=[X]))
    assert found["end-to-end parity"] == (None, "not run: the outputs are random")
    assert found["unit parity"][0]


@pytest.mark.parametrize(("scale", "gate"), [("mean/weight_scale", "end-to-end"), ("decode.0/weight_scale", "unit")])
def test_a_fault_in_the_rest_is_found(scale: str, gate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(quantized: QuantizedModel, opset: int) -> ir.Model:
        model = quantized_to_onnx(quantized, opset)
        value = model.graph.initializers[scale]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.05))
        return model

    monkeypatch.setattr(stage, "quantized_to_onnx", wrong)
    monkeypatch.setattr(parity, "MAX_FLOAT_ERROR", 1.0)  # what a unit gives as a float shows at the end too
    with pytest.raises(ContractError, match=gate):
        export(form_of(), tmp_path, ExportConfig(baselines=None), samples=[X])


def test_shapes_of_random_numbers_are_none() -> None:
    make = onnx.helper.make_node
    nodes = [
        make("RandomNormalLike", ["x"], ["noise"]), make("Shape", ["noise"], ["shape"]),
        make("Reshape", ["x", "shape"], ["same"]), make("Add", ["x", "noise"], ["sum"]),
    ]  # fmt: skip
    assert drawn(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], []))) == {"noise", "sum"}
