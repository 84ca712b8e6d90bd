"""Zero points of what linear layers read, in their biases: the same numbers, and no step behind OpenVINO's product."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.exporting.passes import linear_zeros
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
ZERO = 110


def linear(b: Builder, x: str, *, turned: bool = False, bias: str = "int32") -> str:
    """A layer of 8 inputs and 5 outputs, its weight turned or not."""
    weight = b.op("Transpose", b.weight(5, 8), perm=[1, 0]) if turned else b.weight(8, 5, axis=1)
    result = b.op("MatMul", x, weight)
    if bias == "none":
        return result
    added = b.bias(0.03) if bias == "int32" else b.constant(np.linspace(-1, 1, 5).reshape(1, 5), np.float32)
    return b.op("Add", *((result, added) if bias == "int32" else (added, result)))


def layers(kind: str, zero: int = ZERO) -> onnx.ModelProto:
    b = Builder()
    x = b.pair(b.input("x", ["n", 6, 8]), 0.03, zero)
    if kind == "moved":
        x = b.op("Reshape", b.op("Transpose", x, perm=[1, 0, 2]), b.constant([-1, 8], np.int64))
        return b.model(linear(b, x))
    if kind == "two":
        return b.model(linear(b, x), linear(b, x, turned=True))
    if kind == "gemm":
        row = b.op("Gather", x, b.constant(3, np.int64), axis=1)
        weight = b.weight(5, 8)
        return b.model(b.op("Gemm", row, weight, b.bias(0.03), transB=1))
    options: dict[str, dict[str, Any]] = {"plain": {}, "turned": {"turned": True}, "float bias": {"bias": "float"}}
    return b.model(linear(b, x, **options[kind]))


KINDS = ["plain", "turned", "float bias", "moved", "two", "gemm"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_computes_the_same(kind: str, tmp_path: Path) -> None:
    model = layers(kind)
    changed, rewritten = rewritten_by(linear_zeros.apply, model)
    assert changed == (2 if kind == "two" else 1)
    onnx.checker.check_model(rewritten, full_check=True)
    zeros = {v.name: onnx.numpy_helper.to_array(v) for v in rewritten.graph.initializer}
    read = [node for node in rewritten.graph.node if node.op_type == "DequantizeLinear" and node.input[0] not in zeros]
    assert [int(zeros[node.input[2]]) for node in read] == [0]
    quantizers = [node for node in rewritten.graph.node if node.op_type == "QuantizeLinear"]
    assert [int(zeros[node.input[2]]) for node in quantizers] == [ZERO]
    for one, other in zip(run(rewritten, {"x": X}, tmp_path)[0], run(model, {"x": X}, tmp_path)[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@needs_vnni
@needs_openvino
@pytest.mark.parametrize("kind", KINDS)
def test_openvino_multiplies_integers_and_subtracts_nothing(kind: str, tmp_path: Path) -> None:
    model = layers(kind)
    expected = run(model, {"x": X}, tmp_path)[0]
    for name, file in (("before", model), ("after", rewritten_by(linear_zeros.apply, model)[1])):
        onnx.save(file, tmp_path / f"{name}.onnx")
        session = open_session(tmp_path / f"{name}.onnx", provider="openvino")
        for one, other in zip(session.run({"x": X}), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        products = [kernel for kernel in session.kernels({"x": X}) if kernel.op == "FullyConnected"]
        assert {kernel.dtype for kernel in products} == {"int8"}


def other_readers(kind: str) -> onnx.ModelProto:
    b = Builder()
    x = b.pair(b.input("x", ["n", 6, 8]), 0.03, 0 if kind == "no zero point" else ZERO)
    if kind == "read by a sum":
        return b.model(linear(b, x), b.op("Add", x, x))
    if kind == "given":
        return b.model(linear(b, x), x)
    if kind == "weight in float":
        weight = b.constant(b.random.normal(size=(8, 5)), np.float32)
        return b.model(b.op("Add", b.op("MatMul", x, weight), b.constant(np.ones(5), np.float32)))
    if kind == "computed bias":
        return b.model(b.op("Add", linear(b, x, bias="none"), b.input("bias", [5])))
    if kind == "second factor":
        return b.model(b.op("MatMul", b.weight(6, 6), x))
    if kind == "bias of rows":
        return b.model(b.op("Add", linear(b, x, bias="none"), b.constant(np.ones((6, 1)), np.float32)))
    if kind == "scaled":
        row = b.op("Gather", x, b.constant(3, np.int64), axis=1)
        return b.model(b.op("Gemm", row, b.weight(5, 8), b.bias(0.03), transB=1, alpha=2.0))
    return b.model(linear(b, x, bias="none" if kind == "no bias" else "int32"))


@pytest.mark.parametrize(
    "kind",
    [
        "no zero point", "read by a sum", "given", "weight in float", "computed bias", "second factor", "bias of rows",
        "scaled", "no bias",
    ],
)  # fmt: skip
def test_what_is_left_alone(kind: str) -> None:
    assert rewritten_by(linear_zeros.apply, other_readers(kind))[0] == 0
