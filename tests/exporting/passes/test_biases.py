"""Int32 biases lose their zero point and nothing else, and ONNX Runtime then fuses the convolution."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, rewritten_by, run

from qtool.exporting.passes import biases


def convolution() -> onnx.ModelProto:
    """A quantized convolution whose bias has a zero point, as torch's exporter writes it."""
    b = Builder()
    x = b.pair(b.input("x", [1, 3, 6, 6]), 0.05, 120)
    weight = b.weight(4, 3, 3, 3)
    integers = b.random.integers(-9999, 9999, 4).astype(np.int32)
    scale = b.constant((np.float32(0.05) * b.scales).astype(np.float32))
    bias = b.op("DequantizeLinear", b.constant(integers), scale, b.constant(np.zeros(4, np.int32)), axis=0)
    return b.model(b.pair(b.op("Conv", x, weight, bias), 0.3, 128))


applied = functools.partial(rewritten_by, biases.apply)


def test_only_the_biases_zero_point_goes() -> None:
    model = convolution()
    changed, rewritten = applied(model)
    assert changed == 1
    counts = [len(node.input) for node in rewritten.graph.node if node.op_type == "DequantizeLinear"]
    assert sorted(counts) == [2, 3, 3, 3]
    assert len(rewritten.graph.initializer) == len(model.graph.initializer) - 1
    onnx.checker.check_model(rewritten, full_check=True)


def test_the_numbers_are_the_same() -> None:
    model = convolution()
    x = np.random.default_rng(0).normal(size=(1, 3, 6, 6)).astype(np.float32) * 3
    before, after = (ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (model, applied(model)[1]))
    np.testing.assert_array_equal(before, after)


def test_the_runtime_fuses_it(tmp_path: Path) -> None:
    x = np.zeros((1, 3, 6, 6), np.float32)
    assert "QLinearConv" in run(applied(convolution())[1], {"x": x}, tmp_path)[1]


def test_doing_it_twice_changes_nothing_more() -> None:
    once = applied(convolution())[1]
    assert applied(once)[0] == 0
