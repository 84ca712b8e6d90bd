"""Saturation without VNNI: pairs of products in 16 bits, found on weights and on the bytes that meet them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtool.exporting.gates import saturation
from qtool.exporting.gates.saturation import count_saturated
from qtool.exporting.passes import wide_groups
from qtool.exporting.reference.integer_graph import Node
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import export
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.system import machine


def by_hand(x: np.ndarray, w: np.ndarray) -> int:
    """How many pairs of products leave 16 bits, one after the other."""
    lost = 0
    for row in x.astype(int).tolist():
        for column in w.T.astype(int).tolist():
            products = [a * b for a, b in zip(row, column, strict=True)] + [0]
            lost += sum(not -32768 <= products[k] + products[k + 1] <= 32767 for k in range(0, len(row), 2))
    return lost


def file_of(model: nn.Module, x: torch.Tensor, bits: int, folder: Path) -> onnx.ModelProto:
    quantized = quantize(model.eval(), QuantizeConfig(weight_bits=bits, algorithms=None), example=x, calibration=[x])
    save(quantized_to_onnx(quantized, 21), folder / "a.onnx")
    return onnx.load(folder / "a.onnx")


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)), (4, 9)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, 2)), (2, 3, 8, 8)),
    "one axis": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 4, 3, 2)), (2, 4, 9)),
    "three axes": (lambda: nn.Sequential(nn.Conv3d(12, 16, 2), nn.ReLU(), nn.Conv3d(16, 12, 2)), (2, 12, 4, 4, 3)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)),
        (2, 4, 6, 6),
    ),
    "several of each": (
        lambda: nn.Sequential(nn.Conv2d(4, 12, (6, 3), groups=4), nn.ReLU(), nn.Conv2d(12, 3, 1)),
        (2, 4, 6, 6),
    ),  # over a whole axis, so that its channels are not copied
}


def found_sums(found: list[np.ndarray]) -> list[float]:
    return sorted(np.concatenate(found, 1).ravel().tolist())


def wanted_sums(node: Node, x: torch.Tensor, w: torch.Tensor, zero: torch.Tensor) -> list[float]:
    """The sums of products with the bytes as they are: of what is over the zero point, and of the zero points."""
    if node.op != "Conv":
        w = w.T if node.attributes.get("transB", 0) else w
        return sorted((x @ w + zero * w.sum(0)).flatten().tolist())
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[w.ndim - 3]
    strides, pads = node.attributes.get("strides", 1), node.attributes["pads"][: w.ndim - 2]
    sums = convolve(x, w, None, strides, pads, groups=int(node.attributes.get("group", 1)))
    zeros = (zero * w.flatten(1).sum(1)).reshape(-1, *[1] * (w.ndim - 2))
    return sorted((sums + zeros).flatten().tolist())


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_that_of_the_files_own_products(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_groups, "FEW", 0)  # groups merged have zeros between their weights
    torch.manual_seed(0)
    build, shape = MODELS[name]
    x = torch.rand(shape) + 1
    proto = file_of(build(), x, 8, tmp_path)
    reference = IntegerReference(proto)
    feeds = {reference.graph.inputs[0]: x.numpy()}
    counts, values, total = count_saturated(reference, feeds), reference.trace(feeds), 0
    for unit in reference.units:
        if weights := saturation._matrices(unit, reference):
            x, w = values[unit.node.inputs[0]], reference.constants[unit.node.inputs[1]]
            rows = saturation._rows(unit, x)
            total += sum(by_hand(*pair) for pair in zip(rows, weights, strict=True))
            zero = x.affine.zero_point.double()
            found = [row @ weight.astype(int) for row, weight in zip(rows, weights, strict=True)]
            assert found_sums(found) == wanted_sums(unit.node, x.values.double() - zero, w.values.double(), zero)
    assert sum(counts.values()) == total > 0


@pytest.mark.parametrize("bits", [7, 8])
def test_the_gate_says_what_the_file_needs(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    build, shape = MODELS["conv"]
    x = torch.rand(shape) + 1
    proto = file_of(build(), x, bits, tmp_path)
    feeds = {proto.graph.input[0].name: x.numpy()}
    for features, passed in ((["avx2"], bits == 7), (["avx2", "avx512_vnni"], True)):
        monkeypatch.setattr(machine, "cpu_info", lambda f=features: {"features": f})
        gate = saturation.saturation(IntegerReference(proto), feeds, exact=False)
        assert gate.passed is passed
        assert saturation.saturation(IntegerReference(proto), feeds, exact=True).passed
        assert gate.details["needs"] == ([] if bits == 7 else ["avx512_vnni", "avx_vnni"])


class Attending(nn.Module):
    """Attention whose keys are of one sign for each head, as its weights are, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 8)
        with torch.no_grad():
            signs = torch.tensor([1.0, -1.0]).repeat_interleave(16).repeat(3)[:, None]
            self.attention.in_proj_weight.copy_(signs * torch.empty(96, 32).uniform_(0.8, 1.0) / 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("bits", [7, 8])
def test_in_openvino_seven_bits_cannot_saturate_and_attention_is_float_then(bits: int, tmp_path: Path) -> None:
    """On a CPU without VNNI the file of 8 bits fails its end-to-end gate."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = [torch.rand(8, 6, 32) for _ in range(2)]
    config = QuantizeConfig(target="openvino", effort="fast", weight_bits=bits)
    form = quantize(Attending().eval(), config, example=x[0], calibration=x)
    assert any(unit.kind == "matmul" for unit in form.plan.integer_units) is (bits == 8)
    exported = export(form, tmp_path, ExportConfig(gates=False))
    gate = saturation.saturation_in_openvino(form.plan, exported.files["int8"])
    assert gate.passed is (True if bits == 7 else None)
    assert ("serve files of --weight-bits 7" in gate.found) is (bits == 8)
    if bits == 7 or machine.sums_in_32_bits():
        assert all(
            gate["passed"] is not False
            for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=x).gates
        )


@pytest.mark.parametrize("algorithms", [None, ("pairs",)])
def test_in_openvino_weights_that_a_layer_over_sequences_reads_turned_can_saturate(
    algorithms: tuple[str, ...] | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval(), torch.randn(8, 6, 32)
    config = QuantizeConfig(target="openvino", ranges="minmax", algorithms=algorithms)
    form = quantize(net, config, example=x, calibration=[x])
    save(quantized_to_onnx(form, 20), tmp_path / "a.onnx")
    gate = saturation.saturation_in_openvino(form.plan, tmp_path / "a.onnx")
    assert gate.passed is (True if algorithms else None)
