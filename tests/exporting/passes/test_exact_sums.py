"""Weights and zero points that layers share, and the option by which ONNX Runtime adds products in 32 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from qdq_files import Array, has, needs_x86, options
from torch import Tensor, nn

from qtool.exporting.gates import parity
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import onnx_notes, open_session
from qtool.system import machine

X = torch.rand(8, 16, 6, 6, generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """A convolution that stands in three places and others of as many channels, whose products are of one sign."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.head = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 16)
        for layer in (self.first, self.again, self.head):
            nn.init.uniform_(layer.weight, 0.8, 1.0)
            nn.init.constant_(layer.bias, -0.4 * layer.weight[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.again(x).sigmoid()
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    made = quantize(Shared().eval(), QuantizeConfig(algorithms=()), example=X, calibration=[X])
    result = export(made, tmp_path_factory.mktemp("shared"), ExportConfig(baselines=None), samples=[X])
    return result.files["int8"], result.gates


def outputs(path: Path, told: onnxruntime.SessionOptions) -> Array:
    session = onnxruntime.InferenceSession(str(path), told, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": X.numpy()})
    return np.asarray(found)


def test_no_two_layers_share_a_zero_point_or_bytes(exported: tuple[Path, list[dict[str, object]]]) -> None:
    graph = onnx.load(exported[0]).graph
    weights = {node.input[1] for node in graph.node if node.op_type in ("Conv", "Gemm")}
    reads = [node.input for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] in weights]
    assert len(reads) == 5
    assert len({read[0] for read in reads}) == len({read[2] for read in reads}) == 5
    assert sum(tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1 for tensor in graph.initializer) == 3


@needs_x86
def test_the_file_is_exact_as_it_asks_to_be_opened(exported: tuple[Path, list[dict[str, object]]]) -> None:
    path, gates = exported
    told = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(told["qtool.session"]) == {"session.x64quantprecision": "1"}
    assert onnx_notes.asks_for_exact_sums(path)
    (expected,) = IntegerReference(path).run({"x": X.numpy()})
    np.testing.assert_array_equal(open_session(path).run({"x": X.numpy()})[0], expected)
    np.testing.assert_array_equal(outputs(path, options()), expected)
    (gate,) = (gate for gate in gates if gate["name"] == "saturation")
    assert "3 on these inputs, and none in a session with session.x64quantprecision=1, as" in str(gate["found"])
    if has("avx2") and not has(*machine.VNNI):
        assert np.abs(outputs(path, onnxruntime.SessionOptions()) - expected).max() > 0.01


def test_a_file_that_does_not_ask_is_opened_as_anybody_would(
    exported: tuple[Path, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_notes, "sums_in_32_bits", lambda: False)
    model = onnx.load(exported[0])
    asked = open_session(exported[0])._session.get_session_options()  # type: ignore[attr-defined]
    assert asked.get_session_config_entry("session.x64quantprecision") == "1"
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "plain.onnx")
    assert not onnx_notes.asks_for_exact_sums(tmp_path / "plain.onnx")
    asked = open_session(tmp_path / "plain.onnx")._session.get_session_options()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        asked.get_session_config_entry("session.x64quantprecision")


@pytest.mark.parametrize(("bits", "alone"), [(7, False), (8, True), (4, True)])
def test_a_file_that_cannot_saturate_asks_for_nothing(
    bits: int, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "cpu_info", lambda: {"features": ["avx2"]})
    config = QuantizeConfig(effort="fast", weight_bits=bits, weights_only=alone)
    made = quantize(Shared().eval(), config, example=X, calibration=[X])
    result = export(made, tmp_path, ExportConfig(baselines=None), samples=[X])
    assert all(gate["passed"] for gate in result.gates)
    path = result.files["int8"]
    assert not onnx_notes.asks_for_exact_sums(path)
    if not alone:
        np.testing.assert_array_equal(outputs(path, options()), outputs(path, onnxruntime.SessionOptions()))
