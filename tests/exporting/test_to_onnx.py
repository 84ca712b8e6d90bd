"""The ONNX file computes what the quantized graph means: against torch, the ONNX reference and ONNX Runtime."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import conv_nets
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from onnx.reference import ReferenceEvaluator
from qdq_files import has, needs_x86, options
from torch import Tensor, nn

import qtool.exporting.to_onnx as to_onnx
from qtool.errors import QtoolError, UsageError
from qtool.exporting.gates import parity
from qtool.exporting.gates.coverage import coverage
from qtool.exporting.gates.end_to_end import end_to_end
from qtool.exporting.gates.parity import integer_parity, unit_parity
from qtool.exporting.gates.simulation import is_tie
from qtool.exporting.gates.size import size
from qtool.exporting.stage import export
from qtool.exporting.to_onnx import float_to_onnx, quantized_to_onnx, save
from qtool.form import QuantizedModel, quantize_nodes
from qtool.nested import call, tensors
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes.ort import optimized_graph

OPSET = 21


class Net(nn.Module):
    """A stem with ReLU6, a residual sum, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(self.conv(x) + x).mean((2, 3)))


X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made(model: nn.Module, inputs: Any = X) -> QuantizedModel:
    return quantize(model.eval(), QuantizeConfig(), example=inputs, calibration=[inputs])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizedModel, Path]:
    torch.manual_seed(0)
    model = Net()
    nn.init.uniform_(model.stem[1].bias, -1, 1)
    form = made(model)
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    save(quantized_to_onnx(form, OPSET), path, {"qtool.labels": '["a", "b"]'})
    return form, path


def served(path: Path, *inputs: Tensor, optimize: bool = True) -> list[np.ndarray]:
    told = options()
    if not optimize:
        told.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), told, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))


def test_the_file_equals_the_graph_wherever_it_is_evaluated(exported: tuple[QuantizedModel, Path]) -> None:
    form, path = exported
    expected = form(X).numpy()
    reference = ReferenceEvaluator(str(path)).run(None, {"x": X.numpy()})[0]
    step = np.abs(expected).max() / 100
    for got in (reference, served(path, X, optimize=False)[0], served(path, X)[0]):
        assert np.abs(got - expected).max() < step
        assert np.abs(got - expected).mean() < step / 20


@needs_x86
def test_a_file_that_differs_from_the_integer_reference_fails_on_the_modelled_runtime(
    exported: tuple[QuantizedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert integer_parity(exported[1], parity.IntegerReference(exported[1]), [X]).passed
    run = parity.IntegerReference.run
    monkeypatch.setattr(parity.IntegerReference, "run", lambda self, feeds: [y * 1.01 for y in run(self, feeds)])
    gate = integer_parity(exported[1], parity.IntegerReference(exported[1]), [X])
    assert gate.passed is False
    assert gate.details["num_unequal"] > 0
    monkeypatch.setattr(parity, "MODELLED_RUNTIMES", ("0.0", "0.1"))
    gate = integer_parity(exported[1], parity.IntegerReference(exported[1]), [X])
    assert gate.passed is None
    assert "modelled: 0.0 and 0.1" in gate.found


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_is_free(exported: tuple[QuantizedModel, Path], batch: int) -> None:
    form, path = exported
    got = served(path, X[:batch])[0]
    assert got.shape == (batch, 5)
    assert np.abs(got - form(X[:batch]).numpy()).max() < np.abs(got).max() / 100


def test_a_mutant_is_seen(exported: tuple[QuantizedModel, Path], tmp_path: Path) -> None:
    """A scale 5 % off, a zero point one off and a missing activation each fail the parity of units."""
    form, path = exported
    assert unit_parity(form, path, [X]).passed
    quantizer = next(
        n for n in onnx.load(path).graph.node if n.op_type == "QuantizeLinear" and n.name.startswith("conv")
    )
    for position, change in ((1, lambda v: v * np.float32(1.05)), (2, lambda v: v + np.uint8(1))):
        model = onnx.load(path)
        tensor = next(t for t in model.graph.initializer if t.name == quantizer.input[position])
        tensor.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(tensor)), tensor.name))
        onnx.save(model, tmp_path / "mutant.onnx")
        assert not unit_parity(form, tmp_path / "mutant.onnx", [X]).passed
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.name == "conv/weight_scale")
    rolled = np.roll(onnx.numpy_helper.to_array(weight), 1)
    weight.CopyFrom(onnx.numpy_helper.from_array(rolled, weight.name))
    onnx.save(model, tmp_path / "mutant.onnx")
    assert not unit_parity(form, tmp_path / "mutant.onnx", [X]).passed


def test_weights_are_int8_and_biases_int32(exported: tuple[QuantizedModel, Path]) -> None:
    stored = {t.name: t for t in onnx.load(exported[1]).graph.initializer}
    kinds = {name: stored[name].data_type for name in stored if name.endswith(("/weight", "/bias"))}
    assert kinds == {
        **dict.fromkeys(("stem.0/weight", "conv/weight", "head/weight"), onnx.TensorProto.INT8),
        **dict.fromkeys(("stem.0/bias", "conv/bias", "head/bias"), onnx.TensorProto.INT32),
    }
    for name in ("stem.0/weight", "conv/weight", "head/weight"):
        assert list(stored[f"{name}_scale"].dims) == [stored[name].dims[0]]
    floats = [t for t in stored.values() if t.data_type == onnx.TensorProto.FLOAT]
    assert max(np.prod(t.dims or [1]) for t in floats) <= 8


def test_quantizers_are_those_of_the_graph_in_its_order(exported: tuple[QuantizedModel, Path]) -> None:
    form, path = exported
    model = onnx.load(path)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    found = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    wanted = quantize_nodes(form.graph)
    assert [n.name for n in found] == [f"{n.meta['custom']['unit']}/quantize" for n in wanted]
    for node, source in zip(found, wanted, strict=True):
        assert float(stored[node.input[1]]) == pytest.approx(source.args[1], rel=1e-7)
        assert int(stored[node.input[2]]) == source.args[2]


def test_the_runtime_runs_integers_between_one_quantizer_and_the_last_layer(
    exported: tuple[QuantizedModel, Path],
) -> None:
    form, path = exported
    kinds = Counter(node.op_type for node in optimized_graph(path).graph.node)
    assert kinds["QuantizeLinear"] == 1
    assert kinds["DequantizeLinear"] == 0
    assert kinds["QLinearConv"] == 2
    assert kinds["QLinearAdd"] == kinds["QGemm"] == kinds["QLinearGlobalAveragePool"] == 1
    assert not {"Conv", "FusedConv", "Add", "Relu", "Clip", "ReduceMean", "Gemm"} & set(kinds)
    assert coverage(form.plan, path).passed
    assert size(form, path).passed


def test_the_file_is_valid_tells_its_opset_and_holds_what_it_was_given(exported: tuple[QuantizedModel, Path]) -> None:
    path = exported[1]
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET
    told = {entry.key: entry.value for entry in model.metadata_props}
    assert told == {"qtool.labels": '["a", "b"]'}  # and no option for a session: no product can saturate
    assert str(Path(__file__).parent).encode() not in path.read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()


def test_the_float_file_computes_the_float_graph(exported: tuple[QuantizedModel, Path], tmp_path: Path) -> None:
    graph = exported[0].float_graph
    assert graph is not None
    save(float_to_onnx(graph, X, OPSET), tmp_path / "float.onnx")
    np.testing.assert_allclose(served(tmp_path / "float.onnx", X)[0], graph(X).detach().numpy(), rtol=1e-4, atol=1e-5)
    stored = {t.name for t in onnx.load(tmp_path / "float.onnx").graph.initializer}
    assert {"stem.0/weight", "stem.0/bias", "conv/weight"} <= stored


def test_what_needs_no_decomposing_is_not_traced_again_and_gives_the_same_file(
    exported: tuple[QuantizedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(quantized_to_onnx(exported[0], OPSET), tmp_path / "once.onnx")
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda *_, **__: pytest.fail("traced"))
    quantized_to_onnx(exported[0], OPSET)
    monkeypatch.undo()
    monkeypatch.setattr(to_onnx, "_stays", lambda *_: False)
    save(quantized_to_onnx(exported[0], OPSET), tmp_path / "twice.onnx")
    once, twice = (onnx.load(tmp_path / f"{name}.onnx").graph for name in ("once", "twice"))
    assert [(n.op_type, n.name) for n in once.node] == [(n.op_type, n.name) for n in twice.node]
    assert np.array_equal(served(tmp_path / "once.onnx", X)[0], served(tmp_path / "twice.onnx", X)[0])


class Boxes(NamedTuple):
    boxes: Tensor
    scores: Tensor


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda y: {"logits": y}, ["logits"]),
        (lambda y: {"logits": y, "hidden": None, "states": (y + 1, y * 2)}, ["logits", "states.0", "states.1"]),
        (lambda y: Boxes(y, y.sigmoid()), ["boxes", "scores"]),
        (lambda y: {"x": y}, ["x_2"]),  # the input is called so
        (lambda y: [y, y.sigmoid()], ["output_0", "output_1"]),
    ],
)
def test_outputs_are_called_what_the_model_calls_them(answer: Callable[[Tensor], Any], expected: list[str]) -> None:
    class Answering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return answer(self.linear(x))

    form = made(Answering(), torch.randn(8, 4))
    assert form.float_graph is not None
    for model in (quantized_to_onnx(form, OPSET), float_to_onnx(form.float_graph, form.example, OPSET)):
        assert [value.name for value in model.graph.outputs] == expected


def test_an_operator_without_an_onnx_form_is_decomposed(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.adaptive_avg_pool2d(x, (2, 1)) + nn.functional.logsigmoid(x).mean()

    graph = float_form(Pooled().eval(), X)
    save(float_to_onnx(graph, X, OPSET), tmp_path / "pooled.onnx")
    np.testing.assert_allclose(served(tmp_path / "pooled.onnx", X)[0], graph(X), rtol=1e-5, atol=1e-6)


def test_export_is_silent(exported: tuple[QuantizedModel, Path], capfd: pytest.CaptureFixture[str]) -> None:
    quantized_to_onnx(exported[0], OPSET)
    assert capfd.readouterr() == ("", "")


def test_large_tensors_go_beside_the_file(
    exported: tuple[QuantizedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx, "EXTERNAL_DATA_BYTES", 100)
    path = tmp_path / "large.onnx"
    save(quantized_to_onnx(exported[0], OPSET), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    np.testing.assert_array_equal(served(path, X)[0], served(exported[1], X)[0])


class Outputs(nn.Module):
    """Two inputs; a dict of a quantized map, of its pooled cells (both leave the graph) and of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        y = torch.relu(self.conv(left) + self.conv(right))
        return {"map": y, "rest": (y.mean((2, 3)), right)}


def test_inputs_by_name_and_outputs_of_any_structure(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"right": X, "left": X.flip(0)}
    form = made(Outputs(), inputs)
    path = tmp_path / "outputs.onnx"
    save(quantized_to_onnx(form, OPSET), path)
    model = onnx.load(path)
    assert {value.name for value in model.graph.input} == {"left", "right"}
    session = ort.InferenceSession(str(path), options(), providers=["CPUExecutionProvider"])
    got = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    expected = [value.numpy() for value in tensors(form(inputs))]
    assert [g.shape for g in got] == [e.shape for e in expected]
    for want, value in zip(expected, got, strict=True):
        assert np.abs(want - value).max() <= np.abs(want).max() / 100
    for backwards in (inputs, dict(reversed(inputs.items()))):  # by name, whatever their order
        assert unit_parity(form, path, [backwards]).passed
    gate = end_to_end(form, path, [inputs])
    assert gate.passed
    assert gate.details["num_outputs"] == 3


def test_the_worst_of_several_outputs_decides(tmp_path: Path) -> None:
    form = made(Outputs(), {"left": X, "right": X.flip(0)})
    model = quantized_to_onnx(form, OPSET)
    noisy = next(node for node in model.graph if node.outputs[0].name == model.graph.outputs[1].name)
    twice = ir.node("Add", [noisy.outputs[0], noisy.outputs[0]])
    model.graph.insert_after(noisy, twice)
    twice.outputs[0].name, noisy.outputs[0].name = noisy.outputs[0].name, "half"
    twice.outputs[0].shape, twice.outputs[0].dtype = noisy.outputs[0].shape, noisy.outputs[0].dtype
    model.graph.outputs[1] = twice.outputs[0]
    save(model, tmp_path / "wrong.onnx")
    gate = end_to_end(form, tmp_path / "wrong.onnx", [form.example])
    assert gate.passed is False
    assert gate.details["sqnr_db_file"] < 1


def test_an_input_may_be_called_as_a_layer_is(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, conv: Tensor) -> Tensor:
            return torch.relu(self.conv(conv))

    form = made(Named())
    save(quantized_to_onnx(form, OPSET), tmp_path / "named.onnx")
    assert coverage(form.plan, tmp_path / "named.onnx").passed


class Shifted(nn.Module):
    """A layer whose module moves numbers in float before it, as attention over shifted windows does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.roll(nn.functional.pad(x, (0, 0, 0, 1)), 1, 1), self.weight).softmax(-1)


def test_only_a_unit_s_own_operators_bear_its_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(6), Shifted()), torch.randn(4, 5, 6)
    form = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    assert [(unit.name, unit.integer) for unit in form.plan.units if unit.name.startswith("1")] == [
        ("1.pad", False), ("1.roll", False), ("1", True), ("1.softmax", False)
    ]  # fmt: skip
    save(quantized_to_onnx(form, OPSET), tmp_path / "shifted.onnx")
    kernels = {node.name: node.op_type for node in onnx.load(tmp_path / "shifted.onnx").graph.node}
    assert kernels["1.pad"] == "Pad"
    assert kernels["1.softmax"] == "Softmax"
    gate = coverage(form.plan, tmp_path / "shifted.onnx")
    assert gate.passed, gate


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.silu(self.a(x)))


def test_ties_are_told_from_other_differences(tmp_path: Path) -> None:
    """With a product's step half its factor's, one integer product in 128 lies half-way, where float32 errs."""
    torch.manual_seed(0)
    net, x, width = Gated().eval(), torch.randn(8, 3, 16, 16), 3.1
    ranges = quantize(net, QuantizeConfig(), example=x, calibration=[x]).ranges
    ranges["a"] |= {"low": -width, "high": width}
    ranges["mul"] |= {"low": -0.3, "high": width - 0.3}
    (tmp_path / "ranges.json").write_text(json.dumps(ranges))
    form = quantize(net, QuantizeConfig(ranges_from=str(tmp_path / "ranges.json")), example=x)
    save(quantized_to_onnx(form, OPSET), tmp_path / "gated.onnx")
    gate = unit_parity(form, tmp_path / "gated.onnx", [x])
    assert gate.passed, gate
    assert gate.details["num_ties"] == gate.details["num_unequal"] > 0.001 * gate.details["num_integers"] / 5


def test_a_tie_is_half_way_as_far_as_float32_can_tell() -> None:
    steps = torch.tensor([0.5, -7.5, 200.5 + 2**-13, 3.5 + 2**-11, 4.0, 0.49])
    assert is_tie(steps * 0.25, 0.25).tolist() == [True, True, True, False, False, False]


class Encoder(nn.Module):
    """Attention as language models write it: layers over one input, looked-up positions, a mask, a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.query, self.key, self.value, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("places", torch.arange(32)[None])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(self.places[:, : ids.shape[1]])
        seen = mask.bool()[:, None, None] & mask.bool()[:, None, :, None]
        heads = (layer(x).unflatten(2, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(*heads, seen).transpose(1, 2).flatten(2)
        return self.last(y).relu() + self.last(y)


def test_an_encoder_goes_through_quantize_and_export_and_passes_the_gates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mask = torch.ones(32, 12, dtype=torch.long)
    example = (torch.randint(0, 50, (32, 12)), mask)
    made = quantize(Encoder().eval(), QuantizeConfig(), example=example, calibration=[example])
    layers = [unit.integer for unit in made.plan.units if unit.kind == "linear"]
    assert layers == [True] * 4
    save(quantized_to_onnx(made, OPSET), tmp_path / "encoder.onnx")
    for gate in (coverage(made.plan, tmp_path / "encoder.onnx"), size(made, tmp_path / "encoder.onnx"),
                 unit_parity(made, tmp_path / "encoder.onnx", [example])):  # fmt: skip
        assert gate.passed, gate


class OneHead(nn.Module):
    """Attention over batch × tokens × features, twice: with a mask for each sample, and a causal one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("past", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers[:3])
        seen = (x.mean(2) > -10)[:, None, :].expand(-1, 6, -1)
        x = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.5)
        return self.layers[3](nn.functional.scaled_dot_product_attention(x, k, v, self.past) + x)


def test_attention_without_an_axis_for_heads_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = OneHead().eval(), torch.randn(3, 6, 8)
    form = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    assert form.float_graph is not None
    torch.testing.assert_close(form.float_graph(x), model(x))
    save(float_to_onnx(form.float_graph, x, OPSET), tmp_path / "float.onnx")
    np.testing.assert_allclose(served(tmp_path / "float.onnx", x[:2])[0], model(x[:2]).detach(), rtol=1e-4, atol=1e-5)
    save(quantized_to_onnx(form, OPSET), tmp_path / "attention.onnx")
    gate = unit_parity(form, tmp_path / "attention.onnx", [x])
    assert gate.passed, gate


def test_control_flow_in_a_file_leaves_out_what_cannot_follow_it(tmp_path: Path) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(50, 16, mode="max", padding_idx=0), nn.Linear(16, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    x = torch.randint(0, 50, (16, 6))
    quantized = quantize(Bags().eval(), QuantizeConfig(), example=x[:2], calibration=[x])
    result = export(quantized, tmp_path, ExportConfig(), samples=[x])
    told = {gate["name"]: gate["found"] for gate in result.gates if gate["passed"] is None}
    assert {"integer reference", "saturation", "fp16 range"} == set(told)
    assert all("Loop" in reason for reason in told.values())
    assert set(result.files) == {"fp32", "int8"}


@pytest.mark.parametrize("layer", ["conv", "head"])
def test_a_layer_left_in_float_between_integers_is_float(tmp_path: Path, layer: str) -> None:
    form = quantize(Net().eval(), QuantizeConfig(overrides={layer: "float"}), example=X, calibration=[X])
    save(quantized_to_onnx(form, OPSET), tmp_path / "mixed.onnx")
    kinds = Counter(node.op_type for node in optimized_graph(tmp_path / "mixed.onnx").graph.node)
    assert kinds["QLinearConv"] + kinds["QGemm"] == 2
    for gate in (coverage(form.plan, tmp_path / "mixed.onnx"), unit_parity(form, tmp_path / "mixed.onnx", [X])):
        assert gate.passed, gate


def test_volumes_run_in_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fewest in ("FEWEST_CHANNELS", "FEWEST_IN_GROUPS"):  # integers are slower over so few, and as right
        monkeypatch.setattr(f"qtool.quantization.targets.ort_cpu.{fewest}", 0)
    net = conv_nets.Net(tuple(conv_nets.Layer(kind) for kind in ("plain", "residual", "concat", "max", "avg")), rank=3)
    inputs = conv_nets.example(net, 8)
    form = quantize(conv_nets.build(net), QuantizeConfig(), example=inputs, calibration=[inputs])
    assert form.plan.float_units == ()
    gates = {
        gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[inputs]).gates
    }
    assert gates["coverage"]["passed"]
    assert gates["integer reference"]["passed"] or not has("avx2")


class Viewed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 8 * 7 * 7)


def test_an_activation_behind_a_pool_is_the_layer_s(tmp_path: Path) -> None:
    """As in the first network of many a tutorial."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), Viewed(), nn.Linear(8 * 7 * 7, 5))
    x = torch.randn(8, 3, 16, 16)
    form = quantize(model, QuantizeConfig(), example=x, calibration=[x])
    assert form.plan.float_units == ()
    assert len(quantize_nodes(form.graph)) == 4
    gates = {
        gate["name"]: gate["passed"] for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates
    }
    assert gates["coverage"]


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.conv(x))


def test_an_operator_without_an_onnx_form_is_told_with_the_users_line() -> None:
    form = made(Unsupported())
    with pytest.raises(QtoolError, match=r"operators that have an ONNX form; got .*_linalg_svd") as caught:
        quantized_to_onnx(form, OPSET)
    line = Unsupported.forward.__code__.co_firstlineno + 1
    assert f"test_to_onnx.py:{line}, replace that operator" in str(caught.value)
    assert "\n" not in str(caught.value)


class Steep(nn.Module):
    """An activation whose slope is counted from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.conv(x), x.shape[0] / 10)


def test_an_argument_that_depends_on_the_inputs_is_told_with_the_users_line() -> None:
    form = made(Steep(), torch.randn(4, 3, 10, 10))
    with pytest.raises(QtoolError, match=r"leaky_relu\.default with an argument computed from") as caught:
        quantized_to_onnx(form, OPSET)
    assert "test_to_onnx.py:" in str(caught.value)


@settings(
    max_examples=5, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(conv_nets.nets())
def test_any_net_goes_through_quantize_and_export_and_passes_the_gates(
    tmp_path_factory: pytest.TempPathFactory, net: conv_nets.Net
) -> None:
    model, inputs = conv_nets.build(net), conv_nets.example(net, 8)
    form = made(model, inputs)
    path = tmp_path_factory.mktemp("any") / "net.onnx"
    save(quantized_to_onnx(form, OPSET), path)
    for gate in (size(form, path), coverage(form.plan, path), unit_parity(form, path, [inputs])):
        assert gate.passed, gate
    kinds = Counter(node.op_type for node in optimized_graph(path, weights=False).graph.node)
    assert kinds["QLinearConv"] == sum(unit.kind == "conv" for unit in form.plan.integer_units)
    assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(kinds)
    with torch.no_grad():
        floats = list(tensors(call(model, inputs)))
    graph = [value.detach() for value in tensors(form(inputs))]
    for real, simulated, got in zip(floats, graph, served(path, *inputs), strict=True):
        assert got.shape == tuple(real.shape)
        noise = float((real - simulated).norm())
        assert float((real - torch.from_numpy(got)).norm()) < 1.3 * noise + 0.02 * float(real.norm())


def test_an_opset_that_torch_cannot_write_is_refused_and_not_replaced() -> None:
    form = made(Net())
    assert quantized_to_onnx(form, 20).opset_imports[""] == 20
    with pytest.raises(UsageError, match="--opset: expected one that torch can write this model in; got 99, and 18"):
        quantized_to_onnx(form, 99)


def test_an_uneven_pool_is_exported_with_the_positions_that_it_needs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(7)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(32 * 49, 10)).eval()
    x = torch.randn(8, 3, 20, 20)
    result = export(made(net, x), tmp_path, ExportConfig(baselines=None), samples=[x])
    assert {gate["name"]: gate["passed"] for gate in result.gates}["size"] is True
