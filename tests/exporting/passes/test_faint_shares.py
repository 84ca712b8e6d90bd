"""Shares of places that are always hidden are no denormal numbers, whatever the scores, and results as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting.stage import export
from qtool.exporting.to_onnx import FUSED
from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes.ort import OrtSession

Mix = Callable[["Attending", Tensor, Tensor, Tensor, Tensor], Tensor]
LOWEST = torch.finfo(torch.float32).min


class Attending(nn.Module):
    """Attention of two heads over 6 tokens, and behind it that of one, which nothing is hidden from."""

    def __init__(self, mix: Mix, sharp: float = 1.0) -> None:
        super().__init__()
        self.mix, self.sharp = mix, sharp
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("order", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("hidden", torch.zeros(6, 6).masked_fill(~self.order, -math.inf))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = self.out(self.mix(self, q * self.sharp, k, v, seen[:, None, None]).transpose(1, 2).reshape(-1, 6, 8))
        return F.scaled_dot_product_attention(y, y, y, self.order.float())


def written_out(m: Attending, scores: Tensor, seen: Tensor) -> Tensor:
    """As transformers' older models add causal order and the inputs' mask."""
    return scores + (torch.where(m.order, 0.0, LOWEST) + torch.where(seen, 0.0, LOWEST)).clamp(min=LOWEST)


HIDING: dict[str, Mix] = {
    "what comes later": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "by stored truths": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, m.order),
    "by stored infinity": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, m.hidden),
    "written out": lambda m, q, k, v, seen: (q @ k.mT).masked_fill(~m.order, -math.inf).softmax(-1) @ v,
    "written out, and by the inputs": lambda m, q, k, v, seen: written_out(m, q @ k.mT, seen).softmax(-1) @ v,
    "and by the inputs": lambda m, q, k, v, seen: F.scaled_dot_product_attention(
        q, k, v, seen & (torch.arange(6) <= torch.arange(6)[:, None])
    ),
}
LEFT: dict[str, Mix] = {
    "nothing": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v),
    "by the inputs": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, seen),
    "a little": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, m.order.float()),
}


def quantized(
    mix: Mix, sharp: float, target: str = "ort-cpu"
) -> tuple[nn.Module, QuantizedModel, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Attending(mix, sharp).eval(), (torch.randn(8, 6, 8), torch.rand(8, 6) > 0.3)
    inputs[1][:, 0] = True
    config = QuantizeConfig(effort="fast", target=target)
    return model, quantize(model, config, example=inputs, calibration=[inputs]), inputs


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in ir.load(path).graph]


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("sharp", [1.0, 300.0])
def test_results_stay_and_no_share_is_a_denormal_number(name: str, sharp: float, tmp_path: Path) -> None:
    """Also where scores are hundreds apart, of what is seen and of what is hidden."""
    model, form, inputs = quantized(HIDING[name], sharp)
    exported = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[inputs])
    for kind in ("int8", "fp32"):
        mended_before = name == "by stored infinity" and sharp == 1.0
        assert kinds(exported.files[kind]).count("Sub") == (0 if mended_before else 1)
    file = ir.load(exported.files["fp32"])
    (first, *_) = (node for node in file.graph if node.op_type == "Softmax")
    file.graph.outputs.append(first.outputs[0])
    ir.save(file, tmp_path / "shares.onnx")
    feeds = {"x": inputs[0].numpy(), "seen": inputs[1].numpy()}
    found, shares = OrtSession(tmp_path / "shares.onnx").run(
        feeds if len(file.graph.inputs) == 2 else {"x": feeds["x"]}
    )
    assert not ((shares > 0) & (shares < np.finfo(np.float32).tiny)).any()
    with torch.no_grad():
        np.testing.assert_allclose(found, model(*inputs).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_always_hidden_costs_nothing(name: str, tmp_path: Path) -> None:
    _, form, inputs = quantized(LEFT[name], 1.0)
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[inputs])
    assert "Sub" not in kinds(exported.files["int8"])


def test_a_runtime_that_takes_such_numbers_for_zero_is_left_alone() -> None:
    assert set(FUSED) == {"ort-cpu"}
