"""Activations that are written out are the operators that runtimes have, and others are left as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

ROOT = math.sqrt(2 / math.pi)

WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "gelu, halved last": (lambda x: x * ((x * 0.70710678).erf() + 1) / 2, "gelu"),
    "gelu of GPT-2": (lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))), "gelu"),
    "gelu of Bloom": (lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))), "gelu"),
    "mish": (lambda x: x * F.softplus(x).tanh(), "mish"),
    "silu": (lambda x: x / (1 + (-x).exp()), "silu"),
    "another factor": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.1))), ""),
    "twice as much": (lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))), ""),
    "of two values": (lambda x: x.cos() * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), ""),
    "a part that is read": (lambda x: (y := torch.erf(x / math.sqrt(2.0))) + x * 0.5 * (1.0 + y), ""),
}


class Written(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.before, self.behind = function, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.function(self.before(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_formula_is_the_activation_that_it_computes(name: str) -> None:
    function, kind = WRITTEN[name]
    torch.manual_seed(0)
    model, x = Written(function).eval(), torch.randn(8, 4) * 9
    graph = float_form(model, x)
    calls = [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]
    between = [call for call in calls if call != "linear"]
    assert between == [kind] if kind else not {"gelu", "silu", "mish"} & {*between}
    torch.testing.assert_close(graph(x), model(x))


def test_an_engine_that_converts_the_models_own_modules_leaves_formulas_as_they_are() -> None:
    model, x = Written(WRITTEN[next(iter(WRITTEN))][0]).eval(), torch.randn(8, 4)
    config = QuantizeConfig(engine="torch.ao", target="openvino", algorithms=None)
    made = quantize(model, config, example=x, calibration=[x])
    assert not any(unit.kind in ("gelu", "activation") for unit in made.plan.units)
