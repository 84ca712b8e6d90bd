"""Padding integers is the same as padding what they stand for, and the runtime does it on bytes."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdq_files import Builder, needs_x86, rewritten_by, run

from qtool.exporting.passes import pads
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.runtimes.ort import optimized_graph

SCALE, ZERO = 0.03, 70


def padded(ends: list[int], mode: str = "constant", value: float | None = 0.0, out: float = SCALE) -> onnx.ModelProto:
    b = Builder()
    x = b.pair(b.input("x", ["n", 3, 6, 6]), SCALE, ZERO)
    amounts = b.constant([0, 0, ends[0], ends[1], 0, 0, ends[2], ends[3]], np.int64)
    inputs = [x, amounts] + ([b.constant(value, np.float32)] if value is not None else [])
    y = b.pair(b.op("Pad", *inputs, mode=mode), out, ZERO)
    conv = b.op("Conv", y, b.weight(4, 3, 3, 3), b.bias(out), kernel_shape=[3, 3])
    return b.model(b.pair(conv, 0.05, 100))


applied = functools.partial(rewritten_by, pads.apply)


@needs_x86
@settings(max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    ends=st.lists(st.integers(0, 3), min_size=4, max_size=4), mode=st.sampled_from(["constant", "reflect", "edge"]),
    value=st.sampled_from([0.0, None]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_function_is_the_same_bit_for_bit(
    ends: list[int], mode: str, value: float | None, seed: int, tmp_path: Path
) -> None:
    model = padded(ends, mode, value)
    changed, rewritten = applied(model)
    assert changed == 1
    x = np.random.default_rng(seed).normal(size=(2, 3, 6, 6)).astype(np.float32)
    (want,), (got,) = (run(m, {"x": x}, tmp_path)[0] for m in (model, rewritten))
    assert np.array_equal(want, got)
    assert np.array_equal(IntegerReference(rewritten).run({"x": x})[0], got)


def test_the_runtime_pads_bytes(tmp_path: Path) -> None:
    onnx.save(applied(padded([1, 1, 1, 1]))[1], tmp_path / "a.onnx")
    kinds = [node.op_type for node in optimized_graph(tmp_path / "a.onnx").graph.node if node.op_type != "Transpose"]
    assert kinds == ["QuantizeLinear", "Pad", "QLinearConv", "DequantizeLinear"]


def test_the_runtime_pads_bytes_for_several_readers(tmp_path: Path) -> None:
    b = Builder()
    x = b.pair(b.input("x", ["n", 3, 6, 6]), SCALE, ZERO)
    y = b.pair(b.op("Pad", x, b.constant([0, 0, 0, 0, 0, 0, 1, 1], np.int64), b.constant(0.0, np.float32)), SCALE, ZERO)
    conv = b.pair(b.op("Conv", y, b.weight(3, 3, 2, 2), b.bias(SCALE), kernel_shape=[2, 2]), 0.05, 100)
    most = b.pair(b.op("MaxPool", y, kernel_shape=[2, 2]), SCALE, ZERO)
    model = b.model(b.pair(b.op("Concat", conv, most, axis=1), 0.05, 100))
    _, rewritten = applied(model)
    onnx.save(rewritten, tmp_path / "a.onnx")
    kinds = [node.op_type for node in optimized_graph(tmp_path / "a.onnx").graph.node]
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (1, 1)
    values = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    (want,), (got,) = (run(m, {"x": values}, tmp_path)[0] for m in (model, rewritten))
    assert np.array_equal(want, got)


@pytest.mark.parametrize("model", [padded([1] * 4, value=1.0), padded([1] * 4, out=0.02)], ids=["ones", "rescaled"])
def test_others_stay(model: onnx.ModelProto) -> None:
    assert applied(model)[0] == 0
