"""Products with stored numbers behind integer convolutions: the same numbers, and integers in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from qdq_files import Builder, needs_vnni, rewritten_by, run

from qtool.exporting.passes import behind_layers
from qtool.runtimes import open_session

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")

X = np.random.default_rng(0).normal(size=(2, 4, 6, 7)).astype(np.float32)
PER_CHANNEL = np.array([0.5, -2.0, 1.5, 3.0, -0.1]).reshape(5, 1, 1)


def scaled(
    *steps: tuple[str, object, bool], integer: bool = True, groups: int = 1, read_twice: bool = False
) -> onnx.ModelProto:
    """One weight, two convolutions: behind the second, operators with a number each, on the right or the left."""
    b = Builder()
    x = b.input("x", ["n", 4, 6, 7])
    x = b.pair(x, 0.03, 110) if integer else x
    weight, window = b.weight(5 if groups == 1 else 4, 4 // groups, 3, 3), {"kernel_shape": [3, 3], "group": groups}
    first, second = (b.op("Conv", x, weight, bias, **window) for bias in (b.bias(0.03), b.bias(0.03)))
    value = second
    for kind, number, right in steps:
        other = b.constant(number, np.float32)
        value = b.op(kind, *([value, other] if right else [other, value]))
    return b.model(first, b.op("Relu", value), *([second] if read_twice else []))


@needs_vnni
@needs_openvino
@pytest.mark.parametrize(
    "model",
    [
        scaled(("Mul", 1.3, True)),
        scaled(("Mul", PER_CHANNEL, False)),
        scaled(("Div", PER_CHANNEL, True), ("Add", 0.25, True)),
        scaled(("Add", PER_CHANNEL, False), ("Mul", [[[-0.7]]], True)),
        scaled(("Sub", 1.0, False), ("Mul", 0.5, True), ("Sub", PER_CHANNEL, True), ("Div", -3.0, True)),
        scaled(("Mul", 1.3, True), groups=4),
        scaled(("Sub", PER_CHANNEL, False)),
    ],
    ids=["one", "per channel", "divided", "added before", "chain", "grouped", "taken from"],
)
def test_openvino_convolves_integers_to_the_same_numbers(model: onnx.ModelProto, tmp_path: Path) -> None:
    changed, rewritten = rewritten_by(behind_layers.apply, model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    onnx.save(rewritten, tmp_path / "rewritten.onnx")
    session = open_session(tmp_path / "rewritten.onnx", provider="openvino")
    expected = run(model, {"x": X}, tmp_path)[0]
    for found in (run(rewritten, {"x": X}, tmp_path)[0], session.run({"x": X})):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    convolved = [kernel.dtype for kernel in session.kernels({"x": X}) if kernel.op == "Convolution"]
    assert convolved == ["int8", "int8"]


def test_the_integers_of_a_shared_weight_stay_shared() -> None:
    _, rewritten = rewritten_by(behind_layers.apply, scaled(("Mul", 1.3, True)))
    stored = [v for v in rewritten.graph.initializer if v.data_type == onnx.TensorProto.INT8 and len(v.dims) == 4]
    assert len(stored) == 1


@pytest.mark.parametrize(
    "model",
    [
        scaled(),
        scaled(("Add", 1.3, True)),
        scaled(("Div", 1.3, False)),
        scaled(("Mul", 0.0, True)),
        scaled(("Mul", np.ones((4, 5)), True)),
        scaled(("Mul", np.ones((1, 1, 5, 4, 5)), True)),
        scaled(("Mul", 1.3, True), integer=False),
        scaled(("Mul", 1.3, True), read_twice=True),
    ],
    ids=["nothing", "sum", "divisor", "zero", "of places", "of more axes", "in float", "read twice"],
)
def test_what_is_left_alone(model: onnx.ModelProto) -> None:
    assert rewritten_by(behind_layers.apply, model)[0] == 0
