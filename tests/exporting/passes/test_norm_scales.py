"""Norms of small numbers with their epsilon, also in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from qdq_files import Array, Builder, rewritten_by, run

from qtool.exporting.passes import norm_scales
from qtool.runtimes import open_session


def normed(integer: bool = True) -> onnx.ModelProto:
    """Two norms of a small sum of floats and one or two dequantized numbers."""
    b = Builder()
    x, y = b.input("x", ["n", 5, 16]), b.input("y", ["n", 5, 16])
    small = b.pair(y, 0.0005, 128) if integer else y
    first = b.op("Add", x, small)
    second = b.op("Sub", first, b.op("Transpose", small, perm=[0, 1, 2]))
    weight = b.constant(np.linspace(0.5, 2, 16), np.float32)
    norms = [b.op("LayerNormalization", value, weight, epsilon=1e-5) for value in (first, second)]
    return b.model(*norms, opset=20)


def inputs() -> dict[str, Array]:
    """Small numbers, none between two steps."""
    random = np.random.default_rng(0)
    return {name: (random.integers(-40, 40, (3, 5, 16)) * 0.0005).astype(np.float32) for name in "xy"}


def test_the_numbers_are_the_same(tmp_path: Path) -> None:
    changed, rewritten = rewritten_by(norm_scales.apply, normed())
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    assert [node.op_type for node in rewritten.graph.node].count("Max") == 1
    for before, after in zip(*(run(each, inputs(), tmp_path)[0] for each in (normed(), rewritten)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_floats_are_left() -> None:
    assert rewritten_by(norm_scales.apply, normed(integer=False))[0] == 0


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_adds_the_epsilon_to_real_numbers(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(rewritten_by(norm_scales.apply, normed())[1], path)
    expected = run(normed(), inputs(), tmp_path)[0]
    for found, wanted in zip(open_session(path, provider="openvino").run(inputs()), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def faint(scale: float, *, integers: bool = False) -> onnx.ModelProto:
    """A sum of dequantized small numbers with floats, or with themselves."""
    b = Builder()
    x, y = b.input("x", ["n", 5, 16]), b.input("y", ["n", 5, 16])
    small = b.pair(x, scale, 113)
    return b.model(b.op("Add", b.op("Transpose", small, perm=[0, 1, 2]), small if integers else y), opset=20)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_adds_small_integers_with_their_zero_point(tmp_path: Path) -> None:
    path, feeds = tmp_path / "net.onnx", {name: value * np.float32(1e-4) for name, value in inputs().items()}
    changed, rewritten = rewritten_by(norm_scales.apply, faint(5e-8))
    assert changed == 1
    onnx.save(rewritten, path)
    (expected,), _ = run(faint(5e-8), feeds, tmp_path)
    np.testing.assert_allclose(open_session(path, provider="openvino").run(feeds)[0], expected, atol=1e-9)


@pytest.mark.parametrize("model", [faint(5e-7), faint(5e-8, integers=True)])
def test_other_sums_are_left(model: onnx.ModelProto) -> None:
    assert rewritten_by(norm_scales.apply, model)[0] == 0
