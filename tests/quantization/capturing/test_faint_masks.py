"""What hides places from attention leaves no denormal numbers, and the outputs as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtool
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.faint_masks import GONE, HIDDEN, MOST_APART, thin_masks
from qtool.quantization.capturing.float_form import float_form

Mix = Callable[["Windows", Tensor, Tensor, Tensor], Tensor]


class Windows(nn.Module):
    """Attention within two windows of 6 tokens, whose second is of two parts that do not see each other."""

    def __init__(self, mix: Mix, depth: float = -100.0, sharp: float = 1.0) -> None:
        super().__init__()
        self.mix, self.sharp = mix, sharp
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.randn(2, 6, 6))
        part = torch.tensor([0, 0, 0, 0, 1, 1])
        apart = (part[:, None] != part).float() * depth if math.isfinite(depth) else torch.zeros(6, 6)
        apart[part[:, None] != part] = depth
        self.register_buffer("mask", torch.stack([torch.zeros(6, 6), apart]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(self, q * self.sharp, k, v).transpose(1, 2).reshape(-1, 12, 8).mean(1))


def by_window(m: Windows, scores: Tensor) -> Tensor:
    """As Swin adds its mask: one for each window, behind a bias for each head."""
    return (scores.reshape(-1, 2, 2, 6, 6) + m.mask[:, None]).reshape(-1, 2, 6, 6)


WRITTEN: dict[str, Mix] = {
    "torchvision's": lambda m, q, k, v: by_window(m, q @ k.mT / 2 + m.bias).softmax(-1) @ v,
    "without a bias": lambda m, q, k, v: by_window(m, q @ k.mT / 2).softmax(3) @ v,
    "of torch": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask[1]),
    "beside what else is made of it": lambda m, q, k, v: (
        F.scaled_dot_product_attention(q, k, v, m.mask[1]) + m.mask[1].clamp(min=-80.0).mean()
    ),
    "of torch, with a bias": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias + m.mask[1]),
}
LEFT: dict[str, Mix] = {
    "read elsewhere": lambda m, q, k, v: (q @ k.mT + m.mask[1]).softmax(-1) @ v + m.mask[1] @ v,
    "along another axis": lambda m, q, k, v: (q @ k.mT + m.mask[1]).softmax(-2) @ v,
    "a sigmoid's": lambda m, q, k, v: (q @ k.mT + m.mask[1]).sigmoid() @ v,
    "with a factor": lambda m, q, k, v: (q @ k.mT + m.mask[1] * q.amax()).softmax(-1) @ v,
    "a key's": lambda m, q, k, v: F.scaled_dot_product_attention(q, k + m.mask[1, :, 2:], v),
    "a whole row": lambda m, q, k, v: (q @ k.mT + m.mask[1, :, 4:5].expand(6, 6)).softmax(-1) @ v,
}


def deepest(graph: nn.Module) -> float:
    return min(float(value.min()) for value in graph.state_dict().values())


@pytest.fixture(params=WRITTEN)
def written(request: pytest.FixtureRequest) -> Mix:
    torch.manual_seed(0)
    return WRITTEN[request.param]


X = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", [-100.0, -1e9, -math.inf])
def test_the_outputs_stay_and_shares_are_no_denormal_numbers(written: Mix, depth: float) -> None:
    model = Windows(written, depth).eval()
    graph = float_form(model, X)
    assert deepest(graph) == pytest.approx(HIDDEN, abs=5)  # a bias may be in it
    torch.testing.assert_close(graph(X), model(X), rtol=0, atol=1e-6)
    torch.testing.assert_close(graph(X[:1]), model(X[:1]), rtol=0, atol=1e-6)


def test_where_scores_are_far_apart_places_are_hidden_altogether(written: Mix) -> None:
    model = Windows(written, sharp=30.0).eval()
    graph = float_form(model, X)
    assert deepest(graph) == pytest.approx(GONE, abs=5)
    torch.testing.assert_close(graph(X), model(X), rtol=0, atol=1e-6)


def test_training_goes_on_with_the_bias_beside_it(written: Mix) -> None:
    model = Windows(written)
    graph = capture(model, X, train=True)
    assert thin_masks(graph, X) == 1
    assert {name for name, value in graph.named_parameters() if value.requires_grad} >= {"qkv.weight", "out.bias"}
    assert not any("hidden" in name for name, value in graph.named_parameters() if value.requires_grad)
    torch.testing.assert_close(graph(X), model(X), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LEFT)
def test_what_may_count_otherwise_stays(name: str) -> None:
    torch.manual_seed(0)
    model = Windows(LEFT[name]).eval()
    graph = capture(model, X)
    assert not thin_masks(graph, X)
    torch.testing.assert_close(graph(X), model(X))


def test_a_hidden_share_is_a_normal_number_and_nothing_beside_the_others() -> None:
    least, most = np.exp(np.float32([HIDDEN - MOST_APART, HIDDEN + MOST_APART]))
    assert np.finfo(np.float32).tiny < least < most < 2.0**-24
    assert np.exp(np.float32(GONE)) == 0


def test_what_trains_is_no_mask() -> None:
    model = Windows(WRITTEN["of torch"])
    model.bias = nn.Parameter(model.mask[1])
    model.mix = lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias)
    graph = capture(model, X, train=True)
    assert not thin_masks(graph, X)


def test_infinity_stays_where_scores_are_far_apart() -> None:
    torch.manual_seed(0)
    graph = capture(Windows(WRITTEN["of torch"], -math.inf, sharp=30.0).eval(), X)
    assert thin_masks(graph, X) == 1
    assert deepest(graph) == -math.inf


@pytest.mark.parametrize("options", [{"effort": "fast"}, {"mode": "qat", "epochs": 1}], ids=["ptq", "qat"])
def test_files_hold_no_such_mask(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(X, torch.tensor([0, 1, 2]))]
    quantized = qtool.quantize(Windows(WRITTEN["torchvision's"]).eval(), batches, **options)
    exported = qtool.export(quantized, tmp_path, samples=batches, baselines=["fp32"])
    for kind in ("int8", "fp32"):
        stored = ir.load(exported.files[kind]).graph.initializers.values()
        floats = [value.const_value.numpy() for value in stored if value.const_value is not None]
        assert min(float(v.min()) for v in floats if v.dtype == np.float32) == HIDDEN
