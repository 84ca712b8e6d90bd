"""Biases next to nothing: the same numbers, and the same in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.exporting.passes import faint_biases
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def residual(
    size: tuple[int, ...] = (5, 5), *, bias: Any = None, twice: bool = False, end: str = ""
) -> onnx.ModelProto:
    """y + sin y of an integer convolution's results, or of what is twice as much; or what ``end`` makes of these."""
    b = Builder()
    x = b.pair(b.input("x", ["n", 3, *size]), 0.035, 128)
    weight = b.weight(16, 3, *[3] * len(size))
    given = [] if bias is None else [b.bias(0.035)] if bias else [b.constant(np.zeros(16), np.float32)]
    y = b.op("Conv", x, weight, *given, kernel_shape=[3] * len(size))
    if end:
        return b.model(b.pair(b.op("Relu", y), 0.1, 3) if end == "Quantize" else b.op(end, y))
    y = b.op("Neg", y) if twice else y
    return b.model(b.op("Add", y, b.op("Sin", y)), y)


@needs_vnni
@needs_openvino
@pytest.mark.parametrize(
    ("size", "given"),
    [((5, 5), {}), ((9,), {}), ((4, 4, 4), {}), ((5, 5), {"bias": False}), ((5, 5), {"twice": True})],
    ids=["images", "sequences", "volumes", "a bias of 0", "an operator between"],
)
def test_openvino_scales_what_is_read_twice(size: tuple[int, ...], given: dict[str, Any], tmp_path: Path) -> None:
    model = residual(size, **given)
    changed, rewritten = rewritten_by(faint_biases.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    assert [value.name for value in rewritten.graph.output] == [value.name for value in model.graph.output]
    x = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
    expected, _ = run(model, {"x": x}, tmp_path)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    for found in (run(rewritten, {"x": x}, tmp_path)[0], session.run({"x": x})):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-4)
    assert {kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op == "Convolution"} == {"int8"}


@pytest.mark.parametrize(
    "given", [{"bias": True}, {"end": "Sin"}, {"end": "Quantize"}], ids=["biased", "once", "rounded"]
)
def test_what_is_left_alone(given: dict[str, Any]) -> None:
    assert rewritten_by(faint_biases.apply, residual(**given))[0] == 0
