from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Turned(nn.Module):
    """A layer as GPT-2 has it: the weight is inputs × outputs."""

    def __init__(self, inputs: int, outputs: int, spelling: str = "addmm") -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "matmul":
            return x @ self.weight + self.bias
        if self.spelling == "mm":
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight, beta=0.5 if self.spelling == "scaled" else 1)


def targets(graph: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("spelling", ["addmm", "mm", "matmul"])
def test_a_product_with_a_stored_matrix_is_a_linear_layer(spelling: str, train: bool) -> None:
    torch.manual_seed(0)
    model, x = Turned(4, 6, spelling), torch.randn(3, 4)
    graph = capture(model, x, train=train)
    assert targets(graph).count(aten.linear.default) == 1
    torch.testing.assert_close(graph(x), model(x))
    assert {tuple(value.shape) for value in graph.parameters()} <= {(6, 4), (6,)}
    assert all(value.requires_grad for value in graph.parameters())


def test_the_same_matrix_twice_is_stored_once() -> None:
    layer = Turned(4, 4)
    graph = capture(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(3, 4))
    assert targets(graph).count(aten.linear.default) == 2
    assert [tuple(value.shape) for value in graph.parameters()].count((4, 4)) == 1


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("turn", ["T", "mT", "t", "transpose", "permute", "addmm"])
def test_a_product_with_a_transposed_matrix_is_a_linear_layer_of_the_matrix(turn: str, train: bool) -> None:
    """Square, so that a transpose too many would not be told by the shape."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if turn == "addmm":
                return torch.addmm(self.bias, x, self.weight.T)
            turned = {"T": lambda w: w.T, "mT": lambda w: w.mT, "t": torch.t}
            turned |= {"transpose": lambda w: w.transpose(-1, 0), "permute": lambda w: w.permute(-1, 0)}
            return x @ turned[turn](self.weight)

    torch.manual_seed(0)
    model, x = Layer(4, 4), torch.randn(3, 4)
    graph = capture(model, x, train=train)
    assert targets(graph) == [aten.linear.default]
    torch.testing.assert_close(graph(x), model(x))
    assert next(graph.parameters()).requires_grad


def test_a_matrix_that_is_not_transposed_after_all_is() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T.transpose(0, 1) + x @ self.weight.transpose(1, 1).permute(0, 1)

    model, x = Layer(4, 4), torch.randn(3, 4)
    torch.testing.assert_close(capture(model, x)(x), model(x))


def test_scaled_sums_and_products_of_activations_stay() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.transpose(1, 2)

    assert aten.addmm.default in targets(capture(Turned(4, 6, "scaled"), torch.randn(3, 4)))
    assert aten.linear.default not in targets(capture(Scores(), torch.randn(3, 4, 5)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_a_vector_is_a_product(bias: bool, tmp_path: Path) -> None:
    """The mean of a distribution as D-FINE has it, behind integer layers."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(8, 16)
            self.register_buffer("steps", torch.arange(4.0))
            self.bias = nn.Parameter(torch.tensor(0.5)) if bias else None

        def forward(self, x: Tensor) -> Tensor:
            shares = self.read(x).reshape(-1, 4, 4).softmax(-1)
            return nn.functional.linear(shares, self.steps, self.bias)

    torch.manual_seed(0)
    x, model = torch.randn(16, 8), Mean().eval()
    graph = capture(model, x)
    assert targets(graph).count(aten.linear.default) == 1
    torch.testing.assert_close(graph(x), model(x))
    form = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    assert all(
        gate["passed"] is not False for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates
    )


def test_it_runs_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 5, 16)
    model = nn.Sequential(Turned(16, 24, "matmul"), nn.Flatten(0, 1), nn.ReLU(), Turned(24, 8)).eval()
    form = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    assert [unit.integer for unit in form.plan.units if unit.kind == "linear"] == [True, True]
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    weights = [t for t in onnx.load(str(exported.files["int8"])).graph.initializer if len(t.dims) == 2]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.INT8}
