from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor, nn

import qtool
from qtool.exporting.baselines import beyond_half, overflowing, write_fp16
from qtool.exporting.half_masks import HalfMasks
from qtool.quantization.capturing.float_form import float_form

LIMIT = np.finfo(np.float32).max


def _masked_softmax(path: Path, mask: list[float]) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "mask"], ["sum"]), helper.make_node("Softmax", ["sum"], ["y"])],
        "masked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", len(mask)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", len(mask)])],
        [numpy_helper.from_array(np.array(mask, np.float32), "mask")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), str(path))
    return path


@pytest.mark.parametrize("hidden", [-LIMIT, -np.inf])
def test_a_mask_of_float32s_limit_hides_as_much_in_half(tmp_path: Path, hidden: float) -> None:
    single, half = _masked_softmax(tmp_path / "single.onnx", [0, hidden, 0]), tmp_path / "half.onnx"
    assert write_fp16(ir.load(single), half) == ""
    x = np.array([[1.0, 30.0, 2.0]], np.float32)
    expected, found = (onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0] for path in (single, half))
    assert found[0, 1] == expected[0, 1] == 0
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(("value", "named"), [(65504.0, []), (65536.0, ["mask"]), (-1e30, ["mask"]), (LIMIT, [])])
def test_what_reads_a_constant_beyond_half_stays_in_float32(tmp_path: Path, value: float, named: list[str]) -> None:
    single, half = _masked_softmax(tmp_path / "single.onnx", [0, value]), tmp_path / "half.onnx"
    assert list(overflowing(ir.load(single))) == named
    assert write_fp16(ir.load(single), half) == ""
    (mask,) = onnx.load(half).graph.initializer
    assert mask.data_type == (TensorProto.FLOAT if named else TensorProto.FLOAT16)
    x = np.array([[1.0, -value]], np.float32)
    expected, found = (onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0] for path in (single, half))
    if value != LIMIT:
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_layer_behind_a_constant_beyond_half_is_in_half(tmp_path: Path) -> None:
    """A batch-norm whose variance is beyond it, as a net that works on pixels may have, and a maximum behind −1e9."""
    torch.manual_seed(0)
    net = _Pixels().eval()
    x = 1000 * torch.randn(2, 3, 8, 8)
    exported = qtool.export(qtool.quantize(net, [x], effort="fast"), tmp_path, samples=[x])
    (gate,) = (gate for gate in exported.gates if gate["name"] == "fp16 range")
    assert gate["found"] == "finite outputs"
    stored = {one.name: one.data_type for one in onnx.load(exported.files["fp16"]).graph.initializer}
    assert stored["norm.running_var"] == TensorProto.FLOAT
    assert stored["layer/weight"] == TensorProto.FLOAT16
    found = onnxruntime.InferenceSession(exported.files["fp16"]).run(None, {"x": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found[0], net(x).numpy(), atol=1e-2)


class _Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        nn.init.constant_(self.norm.running_var, 1e6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x.relu()))
        return y.masked_fill(y < 0, -1e9).amax((2, 3))


def test_large_weights_are_those_of_the_converter_of_the_whole_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    values[0, :8] = [LIMIT, -LIMIT, 1e-9, -1e-9, np.inf, 4e-8, 0.0, -0.0]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1000]) for name in ("y", "z")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="first"),
        helper.make_node("CumSum", ["y", "axis"], ["sum"], name="kept in float"),
        helper.make_node("Relu", ["sum"], ["z"], name="last"),
    ]
    constants = [numpy_helper.from_array(values, "w"), numpy_helper.from_array(np.int64(1), "axis")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, constants), opset_imports=[helper.make_opsetid("", 21)]
    )
    assert write_fp16(ir.from_proto(model), tmp_path / "half.onnx") == ""
    found, expected = onnx.load(tmp_path / "half.onnx"), convert_float_to_float16(model, keep_io_types=True)
    onnx.checker.check_model(found, full_check=True)
    nodes_of = [
        sorted((n.op_type, list(n.input), list(n.output)) for n in graph.node)
        for graph in (found.graph, expected.graph)
    ]
    assert nodes_of[0] == nodes_of[1]
    weights = [
        next(numpy_helper.to_array(t) for t in graph.initializer if t.name == "w")
        for graph in (found.graph, expected.graph)
    ]
    assert weights[0].dtype == np.float16
    assert weights[0].tobytes() == weights[1].tobytes()


def test_the_converters_package_can_be_imported_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(onnxruntime.__file__).parent / "transformers"
    for name in [*sys.modules]:
        if name.startswith("onnxruntime.transformers") or name in ("fusion_utils", "onnx_model"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(package)])
    path = [*sys.path]
    single = _masked_softmax(tmp_path / "single.onnx", [0, 1])
    for _ in range(2):
        write_fp16(ir.load(single), tmp_path / "half.onnx")
    assert sys.path == path
    importlib.import_module("onnxruntime.transformers.onnx_utils")


def test_a_constant_that_stays_in_float32_is_not_called_half(tmp_path: Path) -> None:
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 4, 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1, 8, 8])]
    constants = [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")]
    types = [helper.make_tensor_value_info("scales", TensorProto.FLOAT, [4])]
    graph = helper.make_graph(nodes, "resized", inputs, outputs, constants, value_info=types)
    single = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    assert write_fp16(single, tmp_path / "half.onnx") == ""
    onnx.checker.check_model(onnx.load(tmp_path / "half.onnx"), full_check=True)


def test_readers_that_share_a_constant_share_its_cast(tmp_path: Path) -> None:
    nodes = [helper.make_node("Resize", [x, "", "scales"], [y], mode="nearest") for x, y in (("x", "y"), ("y", "z"))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3, 3])]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 2, 12, 12])]
    constants = [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert write_fp16(ir.from_proto(model), tmp_path / "half.onnx") == ""
    x = np.arange(36, dtype=np.float32).reshape(2, 2, 3, 3)
    found = onnxruntime.InferenceSession(str(tmp_path / "half.onnx")).run(None, {"x": x})[0]
    np.testing.assert_array_equal(found, x.repeat(4, 2).repeat(4, 3))


@pytest.mark.parametrize(("order", "computed"), [((1, 0, 2), False), ((1, 2, 0), False), ((1, 0, 2), True)])
def test_what_ends_the_runtime_is_turned_round_or_not_written(
    tmp_path: Path, order: tuple[int, ...], computed: bool
) -> None:
    x, w = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32), np.ones((4, 3), np.float32)
    w = w if order[2] == 0 else np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=order), helper.make_node("MatMul", ["t", "v"], ["y"])]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    given += [helper.make_tensor_value_info("v", TensorProto.FLOAT, w.shape)] if computed else []
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)]
    graph = helper.make_graph(nodes, "g", given, result, [] if computed else [numpy_helper.from_array(w, "v")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    refused = write_fp16(ir.from_proto(model), tmp_path / "half.onnx")
    assert bool(refused) == (computed or order[2] == 0)
    assert (tmp_path / "half.onnx").exists() is not bool(refused)
    if not refused:
        found = onnxruntime.InferenceSession(str(tmp_path / "half.onnx")).run(None, {"x": x})[0]
        np.testing.assert_allclose(found, x.transpose(order) @ w, atol=0.02)


@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0), (1, 2, 0, 3)])
def test_a_turned_batch_times_as_many_dimensions_is_written(tmp_path: Path, order: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 5, 6, 7)[: len(order)]).astype(np.float32)
    turned = x.transpose(order)
    w = random.normal(size=(*turned.shape[:-2], turned.shape[-1], 3)).astype(np.float32)
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=order), helper.make_node("MatMul", ["t", "w"], ["y"])]
    feeds = {"x": x, "w": w}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(order))]
    graph = helper.make_graph(nodes, "g", given, result)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert write_fp16(ir.from_proto(model), tmp_path / "half.onnx") == ""
    found = onnxruntime.InferenceSession(str(tmp_path / "half.onnx")).run(None, feeds)[0]
    np.testing.assert_allclose(found, turned @ w, atol=0.02)


class Overflow(nn.Module):
    """A value beyond 100,000 in the middle, brought back before it leaves, beside a mask of float32's limit."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.where(x > 0, 0.0, -LIMIT)
        return (self.linear(x * self.factor * self.factor) / self.factor / self.factor) + hidden.softmax(1)


@pytest.mark.parametrize(("factor", "passed"), [(320.0, None), (3.0, True)])
def test_an_activation_beyond_half_is_told_although_the_cpu_keeps_it(
    factor: float, passed: bool | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 4) + 1
    result = qtool.export(qtool.quantize(Overflow(factor).eval(), [x]), tmp_path, samples=[x])
    (gate,) = (gate for gate in result.gates if gate["name"] == "fp16 range")
    assert gate["passed"] is passed
    if passed is None:
        assert gate["details"]["beyond"]["mul_1"] == pytest.approx(float(x.max()) * factor**2)
        assert "overflow half precision where it is computed in" in gate["found"]


class Nodes(nn.Module):
    """A graph layer that reduces messages by index, where the CPU provider has no half; and a constant output."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction, self.layer = reduction, nn.Linear(6, 6)
        self.register_buffer("places", torch.arange(3.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        index = (x > 0).long()
        zeros = torch.zeros_like(y)
        if self.reduction == "put":
            return zeros.t().index_put((self.places.long().repeat(2),), y.t(), accumulate=True).t(), self.places
        return zeros.scatter_reduce(1, index, y, self.reduction) if self.reduction else y, self.places


@pytest.mark.parametrize("reduction", ["prod", "sum", "put", ""])
def test_a_file_that_no_kernel_runs_is_left_out_and_one_with_sums_by_index_or_a_constant_output_is_not(
    tmp_path: Path, reduction: str
) -> None:
    torch.manual_seed(0)
    net, batch = Nodes(reduction).eval(), torch.randn(8, 6)
    exported = qtool.export(qtool.quantize(net, [batch]), tmp_path, samples=[batch])
    assert ("fp16" in exported.files) is (reduction != "prod")
    assert (tmp_path / "model.fp16.onnx").exists() is (reduction != "prod")
    (gate,) = (gate for gate in exported.gates if gate["name"] == "fp16 range")
    assert gate["found"].startswith("no FP16 file: it cannot be run: " if reduction == "prod" else "finite outputs")
    for path in exported.files.values():
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        assert [value.name for value in session.get_outputs()] == ["output_0", "output_1"]
        np.testing.assert_array_equal(session.run(None, {"x": batch.numpy()})[1], [0, 1, 2])


class _TimeSteps(nn.Module):
    """A diffusion model's embedding of its time step, which is an integer or a float."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        angle = step[:, None].float() * torch.exp(-9.2 * torch.arange(32) / 32)
        return self.layer(torch.cat([angle.cos(), angle.sin()], 1)) + x


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_sines_of_time_steps_are_those_of_float32(tmp_path: Path, kind: torch.dtype) -> None:
    model, draw = _TimeSteps().eval(), torch.Generator().manual_seed(0)
    x, step = torch.randn(8, 16, generator=draw) / 10, torch.randint(0, 1000, (8,), generator=draw)
    single, half = tmp_path / "single.onnx", tmp_path / "half.onnx"
    torch.onnx.export(model, (x, step.to(kind)), str(single), dynamo=True, verbose=False, external_data=False)
    assert write_fp16(ir.load(single), half) == ""
    casts = [node for node in onnx.load(half).graph.node if node.op_type == "Cast"]
    assert len(casts) == (5 if kind == torch.int64 else 4), "of x, the step, the sine, the cosine and the output"
    session = onnxruntime.InferenceSession(str(half))
    found = session.run(None, {"x": x.numpy(), "step": step.to(kind).numpy()})[0]
    with torch.no_grad():
        expected = model(x, step).numpy()
    assert np.abs(found - expected).max() < 2e-3, "a half's step at 1 is 1e-3"
    assert "Sin" in {node.op_type for node in onnx.load(half).graph.node}


def test_sines_of_what_a_layer_has_made_are_in_half(tmp_path: Path) -> None:
    shapes = [("x", ["n", 2]), ("y", ["n", 4])]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in shapes)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]), helper.make_node("Sin", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["c"]), helper.make_node("Sin", ["c"], ["y"]),
    ]  # fmt: skip
    constants = [
        numpy_helper.from_array(np.full(shape, 0.3, np.float32), name)
        for name, shape in (("first", (2, 4)), ("second", (4, 4)))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    assert write_fp16(ir.from_proto(model), tmp_path / "half.onnx") == ""
    types = {one.name: one.data_type for one in onnx.load(tmp_path / "half.onnx").graph.initializer}
    assert types == {"first": TensorProto.FLOAT, "second": TensorProto.FLOAT16}
    found = onnxruntime.InferenceSession(str(tmp_path / "half.onnx")).run(None, {"x": np.ones((3, 2), np.float32)})[0]
    np.testing.assert_allclose(found, np.sin(4 * 0.3 * np.sin(0.6)), atol=1e-3)


class _Distances(nn.Module):
    """T5's biases: distances between tokens share an index in steps of their logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        far = (place[:, None] - place).abs().clamp(min=1)
        index = (torch.log(far.float() / 8) / math.log(16) * 8).long() + 8
        return x + self.table(torch.where(far < 8, far, index.clamp(max=15)))[..., 0].sum(0)


def test_indices_that_are_computed_are_those_of_float32(tmp_path: Path) -> None:
    model, x = _Distances().eval(), torch.zeros(2, 120)
    with torch.no_grad():
        model.table.weight.copy_(torch.arange(16)[:, None] / 16)
    single, half = tmp_path / "single.onnx", tmp_path / "half.onnx"
    sizes = {"x": {1: torch.export.Dim("length")}}
    torch.onnx.export(
        model, (x,), str(single), dynamo=True, verbose=False, external_data=False, dynamic_shapes=sizes, optimize=False
    )
    assert write_fp16(ir.load(single), half) == ""
    found = onnxruntime.InferenceSession(str(half)).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_array_equal(found, model(x).numpy(), "sixteenths up to 128 are what they are in half")


class _Deviations(nn.Module):
    """Rows divided by their standard deviation, whose square is beyond half, and by the root of a sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = 2000 * self.layer(x)
        norm = large.pow(2).sum(1, keepdim=True).sqrt()
        return (large - large.mean(1, keepdim=True)) / (large.std(1, keepdim=True) + 1e-6), large / norm


def test_sums_of_squares_are_those_of_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = _Deviations().eval(), torch.randn(4, 32)
    exported = qtool.export(qtool.quantize(net, [x], effort="fast"), tmp_path, samples=[x])
    (gate,) = (gate for gate in exported.gates if gate["name"] == "fp16 range")
    assert gate["found"] == "finite outputs"
    nodes = onnx.load(exported.files["fp16"]).graph.node
    made = {name: node for node in nodes for name in node.output}
    squares = [node for node in nodes if node.op_type == "Pow" or (node.op_type == "Mul" and len({*node.input}) == 1)]
    assert [made[node.input[0]].op_type for node in squares] == ["Cast", "Cast"], "to float32"
    found = onnxruntime.InferenceSession(exported.files["fp16"]).run(None, {"x": x.numpy()})
    with torch.no_grad():
        for got, expected in zip(found, net(x), strict=True):
            np.testing.assert_allclose(got, expected.numpy(), atol=1e-2)


def test_what_is_in_memory_not_yet_filled_does_not_overflow() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_empty(x.shape).fill_(2.0) + x

    x = torch.ones(2, 3)
    graph = float_form(Filled(), x)
    (empty,) = (node for node in graph.graph.nodes if "empty" in str(node.target))
    empty.target = _mocked_empty
    assert not beyond_half(HalfMasks(graph), [x])


def _mocked_empty(like: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.full_like(like, 1e30)


_mocked_empty.overloadpacket = torch.ops.aten.new_empty  # type: ignore[attr-defined]
