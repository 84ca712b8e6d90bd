"""Unit parity of what leaves the graph: floats by their error, whole numbers by how many differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting.gates import parity
from qtool.exporting.gates.gate import Gate
from qtool.exporting.gates.parity import MAX_FLOAT_ERROR, unit_parity
from qtool.exporting.gates.simulation import RANKED
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig
from qtool.runtimes import open_session


@pytest.mark.parametrize(("differ", "passes"), [(0, True), (4, True), (6, False)])
def test_a_class_that_falls_the_other_way_is_a_tie_and_many_are_a_fault(differ: int, passes: bool) -> None:
    wanted = torch.arange(5000)
    got = wanted.numpy().copy()
    got[:differ] += 1
    assert (parity._relative_error(wanted, got) <= MAX_FLOAT_ERROR) is passes


@pytest.mark.parametrize(
    ("total", "unequal", "step", "passes"),
    [(128, 1, 1, True), (128, 2, 1, False), (128, 1, 2, False), (10_000, 10, 1, True), (10_000, 11, 1, False)],
)
def test_of_few_integers_one_may_be_another(total: int, unequal: int, step: int, passes: bool) -> None:
    unit, expected = parity._Unit(), np.zeros(total, np.uint8)
    got = expected.copy()
    got[:unequal] += step
    unit.add(expected, got, ties=np.empty(0, np.int64))
    assert unit.agrees is passes


def test_the_error_of_floats_is_in_units_of_the_greatest() -> None:
    assert parity._relative_error(torch.tensor([1.0, -4.0]), np.array([1.0, -3.0], np.float32)) == 0.25


@pytest.mark.filterwarnings("error")
def test_masks_are_equal_and_nothing_else_that_is_infinite_is() -> None:
    wanted = torch.tensor([1.0, -4.0, -torch.inf])
    assert parity._relative_error(wanted, np.array([1.0, -3.0, -np.inf], np.float32)) == 0.25
    for third in (0.0, np.inf, np.nan):
        assert parity._relative_error(wanted, np.array([1.0, -4.0, third], np.float32)) == np.inf
    assert parity._relative_error(wanted[:2], np.array([1.0, np.nan], np.float32)) == np.inf


def parity_of(model: nn.Module, x: Tensor, folder: Path, **options: Any) -> Gate:
    """How the units of a model's file compare, quantized by and on the samples ``x``."""
    form = quantize(model.eval(), QuantizeConfig(**options), example=x, calibration=[x])
    save(quantized_to_onnx(form, 21), folder / "net.onnx")
    return unit_parity(form, folder / "net.onnx", [x])


class Segmenting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).argmax(1)


def test_a_model_that_gives_classes_is_compared_unit_by_unit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 12, 12)
    gate = parity_of(Segmenting(), x, tmp_path)
    assert gate.passed, gate


class Matched(nn.Module):
    """Each sample beside each: the product reads an output turned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (F.normalize(layer(x)) for layer in (self.left, self.right))
        return right, left @ right.t()


def test_an_output_that_is_read_turned_is_not_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    gate = parity_of(Matched(), x, tmp_path, target="openvino", effort="fast")
    assert gate.passed, gate.found


class Proposing(nn.Module):
    """The tokens of highest score, as detectors choose their queries, and what a layer makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.score, self.head = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x).relu()
        places = self.score(x).squeeze(-1).topk(10, dim=1).indices
        return self.head(
            x.gather(1, places.unsqueeze(-1).expand(-1, -1, 16)) + x.sort(1, descending=True).indices[:, :10]
        )


def test_the_first_of_equal_scores_is_chosen_as_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    calibration, x = torch.randn(4, 64, 8), torch.randn(2, 64, 8)
    form = quantize(Proposing().eval(), QuantizeConfig(effort="fast"), example=x, calibration=[calibration])
    save(quantized_to_onnx(form, 21), tmp_path / "net.onnx")
    gate = unit_parity(form, tmp_path / "net.onnx", [0.02 * x])  # few steps of the range, so that many are equal
    assert gate.passed, gate.found


class Routed(nn.Module):
    """Adds up the layers that a router chooses for each sample, in no order, as DeepSeek's does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layers = nn.Linear(8, 6), nn.ModuleList(nn.Linear(8, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        places = self.gate(x).sigmoid().topk(4, dim=-1, sorted=False).indices
        made = torch.stack([layer(x) for layer in self.layers], 1)
        return made.gather(1, places.unsqueeze(-1).expand(-1, -1, 4)).sum(1)


def test_choices_that_promise_no_order_are_compared_in_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    gate = parity_of(Routed(), x, tmp_path, effort="fast")
    assert gate.passed, gate.found


class Ranking(nn.Module):
    """What stands where scores are greatest, in each way of asking for that."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(64, 1), nn.Linear(64, 4)
        with torch.no_grad():
            self.score.weight.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        places = scores.topk(6, dim=1).indices + scores.argsort(1)[:, :6]
        places = places + scores.sort(1, descending=True).indices[:, -6:]
        places = (places + scores.argmax(1, keepdim=True) + scores.min(1)[1].unsqueeze(1)) // 5
        return self.head(x.gather(1, places.unsqueeze(-1).expand(-1, -1, 64)))


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizedModel, Path, Tensor]:
    """Each row's numbers are another's in another order: scores are equal but for what their sums round."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 1, 64, generator=generator).expand(-1, 4, -1)
    x = torch.cat([row[:, torch.randperm(64, generator=generator)] for row in rows for _ in range(4)])
    x = x.reshape(8, 16, 64)
    form = quantize(Ranking().eval(), QuantizeConfig(effort="fast"), example=x, calibration=[x])
    path = tmp_path_factory.mktemp("ranking") / "net.onnx"
    save(quantized_to_onnx(form, 21), path)
    return form, path, x


def test_scores_a_rounding_apart_are_chosen_as_well(ranking: tuple[QuantizedModel, Path, Tensor]) -> None:
    form, path, x = ranking
    session = open_session(path)
    assert not np.array_equal(session.run({session.inputs[0].name: x.numpy()})[0], form(x).detach().numpy())
    gate = unit_parity(form, path, [x])
    assert gate.passed, gate.found


@pytest.mark.parametrize("operator", ["TopK", "ArgMax", "ArgMin"])
def test_a_file_that_chooses_others_is_told(
    ranking: tuple[QuantizedModel, Path, Tensor], operator: str, tmp_path: Path
) -> None:
    form, path, x = ranking
    model = onnx.load(str(path))
    node = next(node for node in model.graph.node if node.op_type == operator)
    if operator == "TopK":
        next(a for a in node.attribute if a.name == "largest").i ^= 1
    else:
        node.op_type = {"ArgMax": "ArgMin", "ArgMin": "ArgMax"}[operator]
    onnx.save(model, str(tmp_path / "other.onnx"))
    gate = unit_parity(form, tmp_path / "other.onnx", [x + torch.randn(x.shape)])
    assert gate.passed is False


@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_values_the_first_come_first(largest: bool) -> None:
    x = torch.randint(0, 3, (2, 300), generator=torch.Generator().manual_seed(0)).float()
    values, places = RANKED[torch.ops.aten.topk.default](x, 100, -1, largest)
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["values", "places"], largest=int(largest))], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 300])],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, [2, 100]),
         helper.make_tensor_value_info("places", TensorProto.INT64, [2, 100])],
        [numpy_helper.from_array(np.array([100]), "k")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for wanted, found in zip(session.run(None, {"x": x.numpy()}), (values, places), strict=True):
        np.testing.assert_array_equal(wanted, found.numpy())


class Rare(nn.Module):
    """Probabilities of what hardly ever happens, as of a click: below 1e-4, where the runtime's sigmoid is coarse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(x) - 10).squeeze(1)


def test_small_probabilities_are_those_of_the_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    gate = parity_of(Rare(), x, tmp_path, effort="fast")
    assert gate.passed, gate.found


def test_arguments_within_arguments_are_fed_by_the_names_of_the_file() -> None:
    batch = {"X": torch.ones(2), "more": {"text": torch.zeros(2), "ids": (torch.full((2,), 2.0),)}}
    fed = parity.by_name(["more_ids_0", "x", "more_text"], batch)
    assert {name: value.tolist() for name, value in fed.items()} == {
        "more_ids_0": [2, 2], "x": [1, 1], "more_text": [0, 0],
    }  # fmt: skip
