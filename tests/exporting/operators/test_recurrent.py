"""Recurrent layers in files: an LSTM in integers, a GRU from bytes, and what has no form in ONNX."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.exporting.gates.saturation import count_saturated
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import ExportResult, export
from qtool.exporting.to_onnx import float_to_onnx, quantized_to_onnx, save
from qtool.form import QuantizedModel
from qtool.graphs.lstm import OPERATOR
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import onnx_notes, open_session
from qtool.runtimes.ort import optimized_graph

X = torch.randn(16, 6, 12, generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    """A recurrent layer of two directions that a linear layer reads, and of which the last state is given too."""

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.rnn = cell(12, 24, layers, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(2 * (options.get("proj_size") or 24), 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.rnn(self.first(x) + x)
        return self.head(states), (last[0] if isinstance(last, tuple) else last).transpose(0, 1)


def made(cell: type[nn.RNNBase] = nn.LSTM, net: dict[str, Any] | None = None, **options: Any) -> QuantizedModel:
    torch.manual_seed(0)
    return quantize(Reader(cell, **net or {}).eval(), QuantizeConfig(**options), example=X, calibration=[X])


def exported(form: QuantizedModel, folder: Path) -> tuple[ExportResult, dict[str, Any]]:
    result = export(form, folder, ExportConfig(baselines=None), samples=[X])
    return result, {gate["name"]: gate for gate in result.gates}


def test_an_lstm_is_integer_from_end_to_end(tmp_path: Path) -> None:
    form = made()
    unit = next(unit for unit in form.plan.units if unit.name == "rnn")
    assert (unit.kind, unit.integer, unit.weight_bits) == ("recurrent", True, 8)
    assert any("range of the whole batch" in note for note in form.plan.notes)
    result, gates = exported(form, tmp_path)
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    assert gates["coverage"]["details"]["num_missing"] == 0
    assert "not covered" not in gates["integer reference"]["found"]
    assert gates["unit parity"]["details"]["num_unequal"] == 0
    assert gates["unit parity"]["details"]["max_float_error"] < 1e-6
    kernels = [node for node in onnx.load(str(result.files["int8"])).graph.node if node.op_type == OPERATOR]
    assert [node.name for node in kernels] == ["rnn", f"rnn/{OPERATOR.lower()}"]


def test_its_form_is_saved_and_loaded(tmp_path: Path) -> None:
    form = made()
    form.save(tmp_path)
    again = QuantizedModel.load(tmp_path, form.plan)
    for ours, theirs in zip(again(X), form(X), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("bits", "algorithms", "risk"), [(8, None, True), (8, ("pairs",), False), (7, None, False)])
def test_products_of_an_lstm_are_counted_where_they_can_saturate(
    tmp_path: Path, bits: int, algorithms: tuple[str, ...] | None, risk: bool
) -> None:
    form = made(net={"layers": 1}, weight_bits=bits, algorithms=algorithms)
    assert {unit.weight_bits for unit in form.plan.units} == {bits, None}
    result, _ = exported(form, tmp_path)
    counts = count_saturated(IntegerReference(result.files["int8"]), {"x": X.numpy()})
    assert (counts.get("rnn", 0) > 0) == risk
    assert onnx_notes.asks_for_exact_sums(result.files["int8"]) == risk
    notes = [note for note in form.plan.notes if note.startswith("pairs")]
    assert [note.partition(",")[0] for note in notes] == (
        ["pairs: the weights of 3 layers fit sums of 16 bits"] if algorithms else []
    )


@pytest.mark.parametrize("cell", [nn.GRU, nn.RNN])
def test_other_cells_are_bytes_that_are_dequantized_when_the_file_is_opened(
    tmp_path: Path, cell: type[nn.RNNBase]
) -> None:
    form = made(cell)
    unit = next(unit for unit in form.plan.units if unit.name == "rnn")
    assert (unit.integer, unit.weight_bits) == (False, 8)
    assert "what they gain is size" in unit.reason
    result, gates = exported(form, tmp_path)
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    assert gates["coverage"]["found"].endswith("1 run in float from integer weights, as planned")
    stored = onnx.load(str(result.files["int8"])).graph.initializer
    floats = [t for t in stored if t.data_type == onnx.TensorProto.FLOAT and sum(n > 2 for n in t.dims) > 1]
    assert not floats
    ran = optimized_graph(result.files["int8"]).graph
    constants = {tensor.name for tensor in ran.initializer}
    readers = [node for node in ran.node if node.op_type == cell.__name__]
    assert len(readers) == 2  # a layer of both directions each, however many steps there are
    assert all(node.input[1] in constants for node in readers)


def test_plain_cells_of_rectified_sums_pass_the_gates(tmp_path: Path) -> None:
    """onnx's own reference operator knows tanh alone."""
    result, gates = exported(made(nn.RNN, {"nonlinearity": "relu"}), tmp_path)
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    assert gates["unit parity"]["details"]["num_unequal"] == 0


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_sequence_is_walked_through_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: type[nn.RNNBase]
) -> None:
    """As torch does to know a result's size: 200 steps of a GRU took a minute."""

    def walked(*args: Any) -> Any:
        raise AssertionError("step by step")

    form = made(cell)
    monkeypatch.setattr(torch._decomp.decompositions, "_rnn_helper", walked)
    form.save(tmp_path)
    for model in (quantized_to_onnx(form, 21), float_to_onnx(form.float_graph, X, 21)):
        assert len(model.graph)


def test_lstm_weights_alone_and_an_lstm_left_in_float(tmp_path: Path) -> None:
    alone = next(unit for unit in made(weights_only=True).plan.units if unit.name == "rnn")
    assert (alone.integer, alone.weight_bits) == (False, 8)
    left = next(unit for unit in made(overrides={"rnn": "float"}).plan.units if unit.name == "rnn")
    assert (left.integer, left.weight_bits, left.reason) == (False, None, "left in float by an override")
    openvino = next(unit for unit in made(target="openvino").plan.units if unit.name == "rnn")
    assert (openvino.integer, openvino.weight_bits) == (False, 8)


def test_a_projected_state_has_no_form_in_onnx(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="projections"):
        form = made(net={"proj_size": 8})
    with pytest.raises(QtoolError, match="expected a recurrent layer that has an ONNX form; got an LSTM with proj"):
        exported(form, tmp_path)


@pytest.mark.parametrize(("cell", "batch_first"), [(nn.LSTM, True), (nn.LSTM, False), (nn.GRU, True), (nn.RNN, False)])
def test_sequences_of_any_length(tmp_path: Path, cell: type[nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    net = Ordered(cell, batch_first).eval()
    batches = [torch.randn(4, length, 12) for length in (5, 9)]
    form = quantize(net, QuantizeConfig(dynamic_axes=(1,)), example=batches[0], calibration=batches)
    result = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=batches)
    assert {gate["passed"] for gate in result.gates} <= {True, None}
    x = torch.randn(3, 21, 12)
    for path, tolerance in ((result.files["fp32"], 1e-5), (result.files["int8"], 0.05)):
        (found,) = open_session(path).run({"x": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(found, net(x).numpy(), atol=tolerance)


class Ordered(nn.Module):
    """Two layers of a plain kind over sequences that stand in either order."""

    def __init__(self, cell: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.rnn = cell(12, 16, 2, batch_first=batch_first, bidirectional=batch_first, bias=batch_first)
        self.head = nn.Linear(32 if batch_first else 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        states = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))[0]
        return self.head(states if self.rnn.batch_first else states.transpose(0, 1))


class Normed(nn.Module):
    """A GRU before a norm that torch's exporter writes with simpler operators, by tracing the whole again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.GRU(4, 8, batch_first=True), nn.RMSNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.cell(x)[0]) + torch.arange(x.shape[1])[:, None]).mean(1)


def test_a_length_stays_open_where_the_exporter_traces_anew(tmp_path: Path) -> None:
    x = torch.randn(4, 6, 4)
    form = quantize(Normed().eval(), QuantizeConfig(dynamic_axes=(1,), effort="fast"), example=x, calibration=[x])
    save(quantized_to_onnx(form, 21), tmp_path / "a.onnx")
    session = open_session(tmp_path / "a.onnx")
    longer = torch.randn(2, 9, 4)
    (found,) = session.run({session.inputs[0].name: longer.numpy()})
    np.testing.assert_allclose(found, form(longer).numpy(), atol=0.05)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_does_not_round_what_stored_weights_multiply(tmp_path: Path) -> None:
    """As it does of 32 numbers and more where it knows the weights for stored ones."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32)
    form = quantize(Wide().eval(), QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    path = export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).files["int8"]
    session = open_session(path, provider="openvino")
    (found,), expected = session.run({"x": x.numpy()}), form(x).numpy()
    assert 10 * np.log10(np.square(expected).mean() / np.square(found - expected).mean()) > 100


class Wide(nn.Module):
    """A plain recurrent layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]
