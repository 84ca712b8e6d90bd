"""Norms that are written out are the operators that they are, with their weights, and others are left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def root_mean(x: Tensor, axis: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-3)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


WRITTEN: dict[str, tuple[Norm, list[str]]] = {
    "Llama's": (lambda x, w, b: w * root_mean(x), ["rms_norm"]),
    "Gemma's": (lambda x, w, b: root_mean(x) * (1.0 + w), ["rms_norm"]),
    "the paper's": (lambda x, w, b: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * w, ["rms_norm"]),
    "without weights": (lambda x, w, b: x * (1e-3 + x.square().mean(-1, keepdim=True)) ** -0.5, ["rms_norm"]),
    "with a bias": (lambda x, w, b: w * root_mean(x) + b, ["rms_norm", "add"]),
    "layer norm": (
        lambda x, w, b: centred(x) / (centred(x).pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * w + b,
        ["layer_norm"],
    ),
    "by its variance": (
        lambda x, w, b: w * (centred(x) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-3)) + b,
        ["layer_norm"],
    ),
    "of n - 1": (lambda x, w, b: w * (centred(x) / torch.sqrt(x.var(-1, keepdim=True) + 1e-3)) + b, []),
    "another axis": (lambda x, w, b: w * root_mean(x, 1), []),
    "another value": (lambda x, w, b: w * (x.cos() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)), []),
    "another power": (lambda x, w, b: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3)), []),
}


class Between(nn.Module):
    """A norm between two layers."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm, self.before, self.behind = norm, nn.Linear(6, 6), nn.Linear(6, 6)
        self.w, self.b = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.norm(self.before(x), self.w, self.b))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_is_one_operator_that_computes_what_the_model_does(name: str) -> None:
    norm, kinds = WRITTEN[name]
    torch.manual_seed(0)
    model, x = Between(norm).eval(), torch.randn(8, 4, 6) * 3
    graph = float_form(model, x)
    calls = [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]
    found = [call for call in calls if call not in ("linear", "sym_size")]
    assert found == kinds if kinds else not {"rms_norm", "layer_norm"} & {*found}
    torch.testing.assert_close(graph(x), model(x))


class OverChannels(nn.Module):
    """A layer norm as ConvNeXt's own code has it, where channels come first."""

    def __init__(self, rank: int, weighted: bool, by_variance: bool) -> None:
        super().__init__()
        self.before, self.behind = ((nn.Conv1d, nn.Conv2d)[rank - 1](6, 6, 1) for _ in range(2))
        self.w, self.b = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))
        self.rank, self.weighted, self.by_variance = rank, weighted, by_variance

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        centred = x - x.mean(1, keepdim=True)
        spread = x.var(1, unbiased=False, keepdim=True) if self.by_variance else centred.pow(2).mean(1, keepdim=True)
        x = centred / torch.sqrt(spread + 1e-3)
        if self.weighted:
            w, b = (each[:, None, None] if self.rank == 2 else each[None, :, None] for each in (self.w, self.b))
            x = w * x + b
        return self.behind(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("rank", "weighted", "by_variance"), [
    (2, True, False), (2, True, True), (1, True, False), (2, False, False),
])  # fmt: skip
def test_a_norm_over_the_channels_of_images_is_one_between_transpositions(
    rank: int, weighted: bool, by_variance: bool
) -> None:
    torch.manual_seed(0)
    model, x = OverChannels(rank, weighted, by_variance).eval(), torch.randn(8, 6, *[5] * rank) * 3
    graph = float_form(model, x)
    calls = [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]
    found = [call for call in calls if call not in (f"conv{rank}d", "sym_size")]
    assert found == ["permute", "layer_norm", "permute"] if weighted else "layer_norm" not in found
    torch.testing.assert_close(graph(x), model(x))


def test_the_plan_has_one_unit_with_its_reason_for_a_norm() -> None:
    torch.manual_seed(0)
    model, x = Between(WRITTEN["Llama's"][0]).eval(), torch.randn(8, 4, 6)
    quantized = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    told = [(unit.kind, unit.reason) for unit in quantized.plan.units if not unit.integer]
    assert told == [("rms_norm", "no integer kernel on this target")]
