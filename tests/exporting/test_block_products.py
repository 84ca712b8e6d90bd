"""Layers of stored integers: what ONNX Runtime makes of them, in which form of the file, against arithmetic by hand."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from qtool.errors import ContractError, UsageError
from qtool.evaluate import sqnr_db
from qtool.exporting import to_onnx
from qtool.exporting.block_products import rounded_in_blocks
from qtool.exporting.gates.simulation import fast_simulation
from qtool.exporting.gates.size import predicted_bytes
from qtool.exporting.passes import block_products
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import export
from qtool.form import QuantizedModel
from qtool.quantization.stage import quantize
from qtool.quantization.stored_weights import dequantize_of, integers_of, scales_of
from qtool.recipe import ExportConfig, QatConfig, QuantizeConfig
from qtool.runtimes import open_session
from qtool.runtimes.base import arithmetic
from qtool.runtimes.ort import OrtSession, optimized_graph

X = torch.randn(4, 7, 48, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 300, (4, 7), generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Linear layers over sequences, the last without a bias, with what no integer kernel takes in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(48, 100), nn.Linear(100, 33), nn.Linear(33, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.softmax(self.first(x), -1))))


class Tied(nn.Module):
    """A language model's two ends: a table, and a last layer that shares it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.last = nn.Embedding(300, 48), nn.Linear(48, 48), nn.Linear(48, 300, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(self.table(tokens))))


def made(model: nn.Module, x: Tensor, **options: object) -> QuantizedModel:
    config = QuantizeConfig(**{"weights_only": True, "algorithms": None} | options)  # type: ignore[arg-type]
    return quantize(model.eval(), config, example=x, calibration=[x])


def layer(x: np.ndarray, bits: int, *, turned: bool = False) -> tuple[onnx.ModelProto, np.ndarray]:
    """A file of one product by stored integers, and the matrix that they stand for."""
    most, size = 2 ** (bits - 1) - 1, x.shape[1]
    generator = np.random.default_rng(size)
    integers = generator.integers(-most, most + 1, (size, 24)).astype(np.int8)
    scales = generator.uniform(0.01, 0.02, 24).astype(np.float32)
    stored = ir.tensor(integers.T if turned else integers).numpy().copy()
    weight = numpy_helper.from_array(stored.astype(ir.DataType.INT4.numpy()) if bits == 4 else stored, "weight")
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["real"], axis=0 if turned else 1),
        helper.make_node("Gemm", ["x", "real"], ["y"], name="layer", transB=int(turned)),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", size]) for n, size in (("x", size), ("y", 24))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight, numpy_helper.from_array(scales, "scale")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, integers.astype(np.float64) * scales.astype(np.float64)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [7, 32, 100])
def test_the_runtime_rounds_in_blocks_of_32_and_the_reference_repeats_it(bits: int, size: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((9, size)).astype(np.float32)
    x[0] = 0
    model, weight = layer(x, bits)
    onnx.save(model, str(tmp_path / "m.onnx"))
    (got,) = open_session(tmp_path / "m.onnx").run({"x": x})
    wanted = rounded_in_blocks(torch.from_numpy(x)).double().numpy() @ weight
    assert sqnr_db(torch.from_numpy(wanted), torch.from_numpy(got)) > 100
    assert sqnr_db(torch.from_numpy(x.astype(np.float64) @ weight), torch.from_numpy(got)) < 55
    (reference,) = IntegerReference(model).run({"x": x})
    assert sqnr_db(torch.from_numpy(reference), torch.from_numpy(got)) > 100
    (unrounded,) = OrtSession(tmp_path / "m.onnx", rounds=False).run({"x": x})
    np.testing.assert_allclose(unrounded, x @ weight, rtol=0, atol=1e-5)


@given(st.integers(1, 80), st.sampled_from([16, 32]), st.integers(0, 5))
def test_no_value_moves_by_more_than_half_a_step_of_its_block(size: int, block: int, seed: int) -> None:
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
    rounded = rounded_in_blocks(x, block)
    assert rounded.shape == x.shape
    for start in range(0, size, block):
        part, made = x[..., start : start + block], rounded[..., start : start + block]
        step = part.abs().amax(-1, keepdim=True) / 127
        assert ((part - made).abs() <= step / 2 * 1.001).all()
        torch.testing.assert_close(made.abs().amax(-1), part.abs().amax(-1))


def test_a_layer_that_the_runtime_would_dequantize_in_every_run_is_turned(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    proto, weight = layer(x, 4, turned=True)
    kernels = []
    for name, is_applied in (("before", False), ("after", True)):
        model = ir.from_proto(proto)
        assert not is_applied or block_products.apply(model, {"layer"}) == 1
        path = tmp_path / f"{name}.onnx"
        ir.save(model, path)
        kernels.append({node.op_type for node in optimized_graph(path).graph.node})
        (got,) = OrtSession(path, rounds=False).run({"x": x})
        np.testing.assert_allclose(got, x @ weight, rtol=0, atol=1e-5)
    assert "DequantizeLinear" in kernels[0]
    assert kernels[1] == {"MatMulNBits"}


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_a_model_multiply_their_stored_integers_and_pass_the_gates(bits: int, tmp_path: Path) -> None:
    quantized = made(Layers(), X, weight_bits=bits, edge_bits=bits)
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[X])
    assert all(gate["passed"] is not False for gate in exported.gates)
    kernels = Counter(node.op_type for node in optimized_graph(exported.files["int8"]).graph.node)
    assert kernels["MatMulNBits"] == 3
    assert not kernels["DequantizeLinear"]
    session = open_session(exported.files["int8"])
    assert arithmetic(session.kernels({"x": X.numpy()})) == {"int8": 3}
    (got,) = session.run({"x": X.numpy()})
    assert sqnr_db(fast_simulation(quantized)(X), torch.from_numpy(got)) > 60
    assert sqnr_db(quantized(X), torch.from_numpy(got)) < 60  # whose inputs are not rounded


@pytest.mark.parametrize("group", [None, 16])
def test_small_layers_of_equal_weights_are_each_multiplied_as_stored(group: int | None, tmp_path: Path) -> None:
    """What they store has at most 1,024 numbers, of which the exporter writes equal ones once."""
    torch.manual_seed(0)
    first, x = nn.Linear(32, 32, bias=False), X[..., :32]
    net = nn.Sequential(first, nn.Tanh(), copy.deepcopy(first))
    exported = export(made(net, x, group_size=group), tmp_path, ExportConfig(gates=False), samples=[x])
    kernels = Counter(node.op_type for node in optimized_graph(exported.files["int8"]).graph.node)
    assert kernels["MatMulNBits"] == 2
    (got,) = open_session(exported.files["int8"]).run({"input": x.numpy()})
    assert sqnr_db(net(x), torch.from_numpy(got)) > 30


@pytest.mark.parametrize("bits", [8, 4])
def test_openvino_multiplies_stored_integers_too(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    quantized = made(Tied(), TOKENS, target="openvino", weight_bits=bits, edge_bits=bits, group_size=16)
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[TOKENS])
    assert all(gate["passed"] is not False for gate in exported.gates)
    found = next(gate["found"] for gate in exported.gates if gate["name"] == "coverage")
    assert found == f"of 2 products 2 in {bits} bits"
    (got,) = open_session(exported.files["int8"], provider="openvino").run({"tokens": TOKENS.numpy()})
    assert sqnr_db(quantized(TOKENS), torch.from_numpy(got)) > 30
    stored = onnx.load(str(exported.files["int8"])).graph.initializer
    kinds = [tensor.data_type for tensor in stored if list(tensor.dims) == [300, 48]]
    assert kinds == [TensorProto.INT8] + ([TensorProto.INT4] if bits == 4 else [])


def test_openvino_dequantizes_a_layer_of_one_output(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    net = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))
    quantized = made(net, X, target="openvino")
    assert [unit.block is not None for unit in quantized.plan.units if unit.weight_bits] == [True, False]
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[X])
    assert next(gate for gate in exported.gates if gate["name"] == "coverage")["passed"]
    blocks = made(net, X).plan.units
    assert [unit.block is not None for unit in blocks if unit.weight_bits] == [True, True]


@pytest.mark.parametrize("algorithms", [None, ("bias",)], ids=["plain", "with a bias"])
def test_a_table_that_a_layer_shares_is_turned_in_the_file_and_stored_once(algorithms, tmp_path: Path) -> None:
    quantized = made(Tied(), TOKENS, algorithms=algorithms)
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[TOKENS])
    assert all(gate["passed"] is not False for gate in exported.gates)
    stored = [t for t in onnx.load(str(exported.files["int8"])).graph.initializer if list(t.dims) == [300, 48]]
    assert len(stored) == 1
    kernels = Counter(node.op_type for node in optimized_graph(exported.files["int8"]).graph.node)
    assert kernels["MatMulNBits"] == 2


class Again(nn.Module):
    """One layer called three times, as ALBERT's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + torch.tanh(self.shared(x))
        return self.last(x)


@pytest.mark.parametrize("options", [{}, {"weight_bits": 4}, {"weight_bits": 4, "group_size": 16}])
def test_a_layer_that_is_called_again_is_dequantized_and_stored_once(options: dict[str, int], tmp_path: Path) -> None:
    quantized = made(Again(), X, **options)
    assert [unit.block is not None for unit in quantized.plan.units if unit.weight_bits] == [True, *[False] * 3, True]
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[X])
    assert all(gate["passed"] is not False for gate in exported.gates)
    stored = [t for t in onnx.load(str(exported.files["int8"])).graph.initializer if list(t.dims) == [64, 64]]
    assert [t.data_type for t in stored] == [TensorProto.INT4 if options else TensorProto.INT8]
    (got,) = open_session(exported.files["int8"]).run({"x": X.numpy()})
    assert sqnr_db(fast_simulation(quantized)(X), torch.from_numpy(got)) > 60


def test_a_layer_that_is_dequantized_after_all_fails_the_coverage_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(to_onnx.BLOCK_PRODUCTS, "ort-cpu", lambda model, units: 0)
    with pytest.raises(ContractError, match=r"0 of 3 multiply stored integers; not: first \(linear\) runs as"):
        export(made(Layers(), X), tmp_path, ExportConfig(baselines=None), samples=[X])


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Sigmoid()], ids=["relu", "relu6", "sigmoid"])
def test_an_activation_behind_a_layer_does_not_keep_the_runtime_from_its_integers(activation, tmp_path: Path) -> None:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), activation, nn.Linear(48, 8), activation)
    exported = export(made(model, x), tmp_path, ExportConfig(baselines=None), samples=[x])
    kernels = Counter(node.op_type for node in optimized_graph(exported.files["int8"]).graph.node)
    assert kernels["MatMulNBits"] == 2


class Uneven(nn.Module):
    """A layer whose inputs have weights of very different size, a group of 16 each, and one that 16 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.last = (
            nn.Linear(*sizes) for sizes in ((20, 64), (64, 20), (20, 9), (9, 4))
        )
        self.second.weight.data *= torch.logspace(0, 3, 4).repeat_interleave(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.relu(self.first(x)))))))


def by_hand(weight: Tensor, size: int) -> Tensor:
    """A weight in 4 bits, with a scale for each group of inputs."""
    groups = weight.reshape(len(weight), -1, size)
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8  # the farthest from 0 is -8 steps
    return ((groups / scale).round().clamp(max=7) * scale).reshape(weight.shape)


X20 = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_groups_have_scales_of_their_own(tmp_path: Path) -> None:
    model = Uneven().eval()
    quantized = made(model, X20, weight_bits=4, group_size=16, weight_ranges="minmax", ranges="minmax")
    blocks = {unit.name: unit.block for unit in quantized.plan.units if unit.weight_bits}
    assert blocks == {"first": 32, "second": 16, "third": 32, "last": 32}
    assert [note for note in quantized.plan.notes if note.startswith("group-size")] == [
        "group-size: one scale for each output where groups of 16 do not fit: third",
        "group-size: one scale for each output where weights have more than 4 bits: first, last",
    ]
    node = next(
        n
        for n in quantized.graph.graph.nodes
        if n.meta.get("custom", {}).get("unit") == "second" and "linear" in str(n.target)
    )
    stored = integers_of(quantized.graph, node) * scales_of(quantized.graph, node)
    torch.testing.assert_close(stored, by_hand(model.second.weight, 16))
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[X20])
    assert all(gate["passed"] is not False for gate in exported.gates)
    graph = onnx.load(str(exported.files["int8"])).graph
    sizes = [a.i for n in graph.node if n.op_type == "DequantizeLinear" for a in n.attribute if a.name == "block_size"]
    assert sizes == [16]
    packed = next(tensor for tensor in graph.initializer if tensor.name == "second/weight")
    assert (packed.data_type, list(packed.dims)) == (TensorProto.INT4, [64, 20])
    plain = made(model, X20, weight_bits=4)
    assert sqnr_db(model(X20), quantized(X20)) > sqnr_db(model(X20), plain(X20)) + 2


@pytest.mark.parametrize(("algorithm", "gain"), [("gptq", 1.0), ("adaround", 1.0), ("renorm", 0.2), ("bias", 0.0)])
def test_methods_fit_groups(algorithm: str, gain: float) -> None:
    model = Uneven().eval()
    options = {"weight_bits": 4, "group_size": 16, "rounding_steps": 200}
    before, after = made(model, X20, **options), made(model, X20, algorithms=(algorithm,), **options)
    with torch.no_grad():
        print(algorithm, sqnr_db(model(X20), after(X20)), sqnr_db(model(X20), before(X20)))
    steps = [dequantize_of(n).args[1] for n in after.graph.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(steps) == 4


def test_an_opset_without_scales_of_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="--opset: expected 21 or more for scales of groups; got 20"):
        to_onnx.quantized_to_onnx(made(Layers(), X, group_size=16), 20)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"group_size": 24}, "expected a power of 2; got 24"),
        ({"group_size": 32, "weights_only": False}, "got --target ort-cpu with integer activations"),
        ({"group_size": 32, "target": "tensorrt"}, "got --target tensorrt with weights alone"),
        ({"weight_bits": 4, "target": "openvino", "weights_only": False}, "7 or 8 for target 'openvino'"),
    ],
)
def test_groups_where_there_is_no_kernel_for_them_are_refused(options: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        made(Uneven(), X20, **options)


@pytest.mark.parametrize(
    "options", [{"group_size": 16, "weight_bits": 4, "edge_bits": 4}, {}], ids=["groups", "shared"]
)
def test_the_size_gate_predicts_the_bytes_of_what_is_stored(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    layers, table = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)), Tied()
    quantized = made(layers, torch.randn(4, 256), **options) if options else made(table, TOKENS)
    model = ir.to_proto(to_onnx.quantized_to_onnx(quantized, 21))
    stored = [t for t in model.graph.initializer if t.data_type != TensorProto.INT64]
    sizes = [
        numpy_helper.to_array(t).size * {TensorProto.INT4: 0.5, TensorProto.INT8: 1}.get(t.data_type, 4) for t in stored
    ]
    assert abs(predicted_bytes(quantized) - sum(sizes)) < 600  # zero points of one scale for each output


@pytest.mark.parametrize(("freeze_bn", "third"), [(0.0, 16), (0.5, 32)])
def test_a_weight_behind_which_a_batch_norm_trains_has_no_groups(freeze_bn: float, third: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.BatchNorm1d(32), nn.Linear(32, 4))
    x = torch.randn(16, 32)
    config = QuantizeConfig(mode="qat", weights_only=True, weight_bits=4, group_size=16, algorithms=None)
    quantized = quantize(
        model.eval(), config, example=x, calibration=[x], qat=lambda graph, *_: graph(x),
        tuning=QatConfig(freeze_bn=freeze_bn),
    )  # fmt: skip
    blocks = [unit.block for unit in quantized.plan.units if unit.weight_bits]
    assert blocks == [32, 16, third, 32]
    assert any("groups of 16 do not fit: 2" in note for note in quantized.plan.notes) is (third == 32)
    assert torch.isfinite(quantized(x)).all()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("options", [{}, {"weight_bits": 4, "group_size": 16, "target": "openvino"}], ids=str)
def test_layers_that_are_copies_of_one_another_have_their_own_scales(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("target"):
        pytest.importorskip("openvino")
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 48, batch_first=True), 2).eval()
    form = quantize(net, QuantizeConfig(weights_only=True, effort="fast", **options), example=X, calibration=[X])
    assert all(
        gate["passed"] is not False for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[X]).gates
    )
