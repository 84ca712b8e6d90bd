"""Attention as its products: the same function, both products integer in the plan, in the file and in OpenVINO."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from nets_modern import VisionTransformer
from onnx import numpy_helper
from qdq_files import needs_vnni
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import UsageError
from qtool.exporting.gates.end_to_end import sqnr_in_torch
from qtool.exporting.gates.openvino_coverage import coverage
from qtool.exporting.gates.parity import feeds_of, unit_parity
from qtool.exporting.revert import in_float
from qtool.exporting.stage import export
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.form import QuantizedModel, Unit, quantize_nodes
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.attention import drop_masks, write_attention
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
FLOAT_PRODUCT = "layers.0.attention/matmul_2"  # what its node is called where it is no integer unit
SEEN = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.3
SEEN.fill_diagonal_(True)
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Attention of two heads over 5 tokens of 8 features, ``mix`` its core."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(8, 24), nn.Linear(8, 8), mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


MIXES: dict[str, Mix] = {
    "plain": F.scaled_dot_product_attention,
    "a factor": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "a factor of 0": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.0),
    "a boolean mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, SEEN),
    "a mask to add": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=SEEN.float().log()),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_graph_computes_the_same(mix: Mix) -> None:
    torch.manual_seed(0)
    net, x = Heads(mix).eval(), torch.randn(3, 5, 8)
    graph = capture(net, x)
    assert write_attention(graph) == 1
    assert write_attention(graph) == 0
    assert sum(node.target is aten.matmul.default for node in graph.graph.nodes) == 2
    torch.testing.assert_close(graph(torch.cat([x, x])), net(torch.cat([x, x])), rtol=1e-5, atol=1e-6)


class Masked(nn.Module):
    """Attention under a stored mask, which is spread over the batch as transformers spreads it."""

    def __init__(self, mask: Tensor, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x[:, None], self.mask[None, None].expand(x.shape[0], -1, -1, -1))


def by_place(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


def by_name(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.5)


@pytest.mark.parametrize("mix", [by_place, by_name])
@pytest.mark.parametrize(
    ("mask", "dropped"), [(torch.ones(5, 5, dtype=torch.bool), 1), (SEEN, 0), (torch.zeros(5, 5), 0)]
)
def test_a_mask_that_hides_nothing_is_dropped(
    mask: Tensor, dropped: int, mix: Callable[[Tensor, Tensor], Tensor]
) -> None:
    net, x = Masked(mask, mix).eval(), torch.randn(3, 5, 8)
    graph = capture(net, x)
    assert drop_masks(graph) == dropped
    assert len(list(graph.buffers())) == 1 - dropped
    torch.testing.assert_close(graph(torch.cat([x, x])), net(torch.cat([x, x])), rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_is_a_number() -> None:
    torch.manual_seed(0)
    blind = SEEN.clone()
    blind[2] = False
    net, x = Heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, blind)).eval(), torch.randn(3, 5, 8)
    graph = capture(net, x)
    assert write_attention(graph) == 1
    found, others = graph(x), [0, 1, 3, 4]
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:, others], net(x)[:, others], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_written_stays_whole() -> None:
    net, x = Heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)).eval(), torch.randn(3, 5, 8)
    graph = capture(net, x)
    assert write_attention(graph) == 0
    torch.testing.assert_close(graph(x), net(x))


@functools.cache
def small_vit(target: str = "openvino", **overrides: str) -> tuple[QuantizedModel, list[Tensor]]:
    """Each made once: tests change nothing of it."""
    torch.manual_seed(0)
    net, batches = VisionTransformer(10, 16, 4, 32, 2, 2).eval(), list(torch.randn(16, 3, 16, 16).split(8))
    config = QuantizeConfig(target=target, overrides=overrides, algorithms=None, ranges="minmax")
    return quantize(net, config, example=batches[0][:2], calibration=batches), batches


@needs_vnni
def test_products_read_what_has_its_zero_at_zero_and_the_file_opens_in_onnx_runtime(tmp_path: Path) -> None:
    quantized, batches = small_vit()
    assert sum(unit.kind == "matmul" and unit.integer for unit in quantized.plan.units) == 4
    result = export(quantized, tmp_path, ExportConfig(baselines=None), samples=batches)
    graph = onnx.load(result.files["int8"]).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}

    def zero_point(name: str) -> tuple[str, int]:
        while made_by[name].op_type in ("Transpose", "Gather", "Reshape"):
            name = made_by[name].input[0]
        assert made_by[name].op_type == "DequantizeLinear", name
        value = constants[made_by[name].input[2]]
        return str(value.dtype), int(value)

    products = [node for node in graph.node if node.op_type == "MatMul" and "attention.matmul" in node.name]
    assert [[zero_point(name) for name in node.input] for node in products] == 2 * [
        [("int8", 0), ("int8", 0)],  # queries and keys
        [("uint8", 0), ("int8", 0)],  # probabilities and values
    ]
    passed = {gate["name"]: gate["passed"] for gate in result.gates}
    assert passed["unit parity"] is passed["end-to-end parity"] is True
    session = onnxruntime.InferenceSession(str(result.files["int8"]), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": batches[0].numpy()})[0].shape == (8, 10)


def test_nothing_is_rounded_again_behind_a_move() -> None:
    quantized, _ = small_vit()
    moves = (aten.reshape.default, aten.transpose.int, aten.permute.default, aten.flatten.using_ints)
    ops = torch.ops.quantized_decomposed
    rounded = [node for node in quantized.graph.graph.nodes if node.target is ops.quantize_per_tensor.default]
    assert rounded
    assert not [node for node in rounded if node.args[0].target in moves]


def test_an_opset_in_which_onnx_runtime_would_not_open_the_file_is_refused(tmp_path: Path) -> None:
    """From 21 on it adds to int8 values that are moved what it refuses itself."""
    quantized, _ = small_vit()
    refused, opened = tmp_path / "21.onnx", tmp_path / "20.onnx"
    with pytest.raises(UsageError, match=r"--opset: expected 20 or less .*; got 21; leave --opset out"):
        save(quantized_to_onnx(quantized, 21), refused)
    save(quantized_to_onnx(quantized, 20), opened)
    onnxruntime.InferenceSession(str(opened), providers=["CPUExecutionProvider"])
    assert not refused.exists()
    later = onnx.load(opened)
    later.opset_import[0].version = 21
    onnx.save(later, refused)
    with pytest.raises(Exception, match="output_dtype INT8 does not match"):
        onnxruntime.InferenceSession(str(refused), providers=["CPUExecutionProvider"])


@needs_openvino
def test_openvino_turns_no_keys(tmp_path: Path) -> None:
    """Their transposition is the product's own: what is moved is queries, keys and values together, and the result."""
    quantized, batches = small_vit()
    file = export(quantized, tmp_path, ExportConfig(gates=False), samples=batches).files["int8"]
    import openvino

    compiled = openvino.Core().compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [op.get_rt_info()["layerType"] for op in compiled.get_runtime_model().get_ops()]
    assert sum(kind == "Transpose" for kind in kinds) == 1 + 2 * 2  # the patches', and two in each of two blocks


def test_a_block_goes_back_to_float(tmp_path: Path) -> None:
    made, batches = small_vit()
    made.save(tmp_path)
    quantized = QuantizedModel.load(tmp_path, made.plan)  # sizes that are computed come back without a name
    block = {unit.name: "asked" for unit in quantized.plan.units if unit.name.startswith("layers.0.")}
    reverted = in_float(quantized, block)
    assert {unit.name for unit in reverted.plan.float_units} >= block.keys()
    assert len(quantize_nodes(reverted.graph)) < len(quantize_nodes(quantized.graph))
    path = tmp_path / "a.onnx"
    save(quantized_to_onnx(reverted, 20), path)
    assert unit_parity(reverted, path, batches[:1]).passed
    assert sqnr_in_torch(reverted, batches) >= sqnr_in_torch(quantized, batches)


@needs_openvino
def test_attention_that_runs_in_float_fails_the_gate_by_name(tmp_path: Path) -> None:
    for overrides, product in (({}, "layers.0.attention.matmul_2"), ({"*matmul*": "float"}, FLOAT_PRODUCT)):
        quantized, batches = small_vit(**overrides)
        path = export(quantized, tmp_path, ExportConfig(gates=False)).files["int8"]
        plan = dataclasses.replace(quantized.plan, units=(Unit(product, "matmul", (), integer=True, reason=""),))
        gate = coverage(plan, path, feeds_of(onnx.load(path), batches[0]))
        assert gate.passed is (not overrides)
        assert (f"in float: {product}" in gate.found) is bool(overrides)


def test_a_target_without_integer_products_keeps_attention_whole() -> None:
    assert {unit.kind for unit in small_vit("ort-cpu")[0].plan.float_units} >= {"scaled_dot_product_attention"}
    plan = small_vit(**{"*.attention*": "float"})[0].plan
    assert [unit.integer for unit in plan.units if unit.kind == "matmul"] == [False] * 4
