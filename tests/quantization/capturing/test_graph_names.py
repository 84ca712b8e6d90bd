"""Names of weights: modules of a user's may be called what a graph module has for itself, and keywords."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.names import spelled
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleDict({"class": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8)}))
        self.add_module(f"{name}_", nn.Conv2d(3, 8, 3))
        self.register_buffer("global", torch.full((8,), 2.0))
        self.recompile = nn.Linear(8, 4)
        self.code = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = getattr(self, self.name), getattr(self, f"{self.name}_")
        y = torch.relu(first["norm"](first["class"](x)) + second(x)).mean((2, 3))
        return self.recompile(y * getattr(self, "global"))  # type: ignore[no-any-return]


X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["meta", "graph", "delete_submodule", "validate_inputs", "lambda"])
def test_a_model_with_such_names_is_quantized_and_told_of_by_them(name: str) -> None:
    model = Net(name).eval()
    graph = capture(model, X)
    assert graph.meta["notes"] == ("module 'code' is no part of the captured graph",)
    with torch.no_grad():
        torch.testing.assert_close(graph(X), model(X))
    config = QuantizeConfig(effort="fast", overrides={f"{name}.class": "float"})
    units = {unit.name: unit.integer for unit in quantize(model, config, example=X, calibration=[X]).plan.units}
    assert (units[f"{name}.class"], units["recompile"]) == (False, True)


def test_no_weight_takes_another_ones_name() -> None:
    assert spelled("class", ["class", "class_", "class__"]) == "class___"
