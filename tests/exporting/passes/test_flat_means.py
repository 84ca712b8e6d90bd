"""Means and sums over sequences: the same numbers in OpenVINO, however many samples there are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from qdq_files import Builder, rewritten_by, run

from qtool.exporting.passes import flat_means
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def reduced(kind: str, axes: list[int], *, keep: int = 1, rounded: bool = True, size: tuple[int, ...] = (4, 20)):
    """What a sequence of integers comes to, and a layer that reads it where it is rounded."""
    b = Builder()
    value = b.pair(b.input("x", ["n", *size]), 0.03, 110)
    options = [] if kind == "GlobalAveragePool" else [b.constant(axes, np.int64)]
    value = b.op(kind, value, *options, **({"keepdims": keep} if options else {}))
    return b.model(b.pair(value, 0.02, 120) if rounded else value)


@needs_openvino
@pytest.mark.parametrize(
    "model",
    [
        reduced("ReduceMean", [2]), reduced("ReduceMean", [-1], keep=0), reduced("GlobalAveragePool", []),
        reduced("ReduceMean", [1], rounded=False), reduced("ReduceMean", [1], keep=0, rounded=False),
        reduced("ReduceMean", [2, 1], keep=0, rounded=False), reduced("ReduceSum", [2], rounded=False),
    ],
)  # fmt: skip
def test_openvino_gives_the_same_numbers_for_many_samples(model: onnx.ModelProto, tmp_path: Path) -> None:
    changed, rewritten = rewritten_by(flat_means.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(33, 4, 20)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    np.testing.assert_allclose(run(rewritten, {"x": x}, tmp_path)[0][0], expected, rtol=1e-5, atol=1e-6)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    found = open_session(tmp_path / "rewritten.onnx", provider="openvino").run({"x": x})[0]
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 0.001  # where a mean is a tie another step may be taken


@pytest.mark.parametrize("model", [reduced("ReduceMean", [2, 3], size=(4, 5, 6)), reduced("ReduceMax", [2])])
def test_what_is_left_alone(model: onnx.ModelProto) -> None:
    assert rewritten_by(flat_means.apply, model)[0] == 0
