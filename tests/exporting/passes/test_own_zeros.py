"""Zero points that several activations share: the same numbers, and one for each in OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
from qdq_files import Builder, rewritten_by, run

from qtool.exporting.passes import own_zeros
from qtool.runtimes import open_session


def summed() -> onnx.ModelProto:
    """The sum of a product of two activations, all of one zero point that is stored once, one of them moved."""
    b = Builder()
    zero, scale = b.constant(133, np.uint8), b.constant(0.03, np.float32)

    def pair(value: str, *, turned: bool = False) -> str:
        integers = b.op("QuantizeLinear", value, scale, zero)
        integers = b.op("Transpose", integers, perm=[0, 2, 3, 1]) if turned else integers
        return b.op("DequantizeLinear", integers, scale, zero)

    value, other = (b.input(name, ["n", 4, 5, 6]) for name in ("x", "y"))
    product = pair(b.op("Mul", pair(value, turned=True), pair(other, turned=True)))
    return b.model(b.op("ReduceSum", product, b.constant([-1], np.int64), keepdims=1))


def test_each_activation_has_a_zero_point_of_its_own(tmp_path: Path) -> None:
    model = summed()
    changed, rewritten = rewritten_by(own_zeros.apply, model)
    assert changed == 4  # the first keeps the one that there is
    zeros = [node.input[2] for node in rewritten.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert sorted(zeros.count(zero) for zero in set(zeros)) == [2, 2, 2]
    feeds = {name: np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32) for name in "xy"}
    (expected,), _ = run(model, feeds, tmp_path)
    np.testing.assert_array_equal(run(rewritten, feeds, tmp_path)[0][0], expected)
    if importlib.util.find_spec("openvino"):
        onnx.save(rewritten, tmp_path / "rewritten.onnx")
        found = open_session(tmp_path / "rewritten.onnx", provider="openvino").run(feeds)[0]
        assert np.abs(found - expected).mean() < 0.01  # a tie or two may take the other step
