"""Strides over a single column: the same numbers without, and rightly from OpenVINO in integers and in bfloat16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.evaluate import sqnr_db
from qtool.exporting.passes import single_columns
from qtool.runtimes import open_session
from qtool.runtimes.openvino import own_precision

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def narrow(columns: int, *, integer: bool, taps: int = 3, **given: Any) -> onnx.ModelProto:
    """A convolution of stride 2 over 9 rows of a few columns, between integers or not."""
    b = Builder()
    options = {"kernel_shape": [3, taps], "strides": [1, 2], "pads": [1, 1, 1, 1]} | given
    x = b.input("x", ["n", 8, 9, columns])
    if integer:
        return b.model(b.op("Conv", b.pair(x, 0.03, 110), b.weight(16, 8, 3, taps), **options))
    return b.model(b.op("Conv", x, b.constant(b.random.normal(size=(16, 8, 3, taps)), np.float32), **options))


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {}), (4, {"pads": [0] * 4}), (3, {"pads": [0] * 4}), (5, {"strides": [2, 4], "pads": [1, 1, 1, 0]}),
    (6, {"dilations": [1, 2], "pads": [0] * 4}),
]  # fmt: skip


@needs_vnni
@needs_openvino
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(("columns", "given"), CASES)
def test_the_numbers_are_those_of_the_stride(
    columns: int, given: dict[str, Any], integer: bool, tmp_path: Path
) -> None:
    model = narrow(columns, integer=integer, **given)
    changed, rewritten = rewritten_by(single_columns.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 8, 9, columns)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    (found,), _ = run(rewritten, {"x": x}, tmp_path)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    assert sqnr_db(torch.tensor(expected), torch.tensor(session.run({"x": x})[0])) > 50
    ran = {kernel.dtype for kernel in session.kernels({"x": x}) if kernel.op == "Convolution"}
    assert ran == {"int8" if integer else "float32"}
    if own_precision() == "bfloat16" and not integer:
        half = open_session(tmp_path / "rewritten.onnx", provider="openvino", precision="bf16")
        assert sqnr_db(torch.tensor(expected), torch.tensor(half.run({"x": x})[0])) > 30


@pytest.mark.parametrize(
    ("columns", "given"),
    [(5, {}), (2, {"strides": [2, 1]}), (1, {"auto_pad": "SAME_UPPER", "pads": [0] * 4})],
    ids=["more columns", "no stride", "padding by a word"],
)
def test_what_is_left_alone(columns: int, given: dict[str, Any]) -> None:
    assert rewritten_by(single_columns.apply, narrow(columns, integer=True, **given))[0] == 0
