"""The stem pass changes no output: the same integers in ONNX Runtime, and in the ONNX reference's own arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import first_layer, rewritten_by, run

from qtool.exporting.passes import stem
from qtool.exporting.reference.integer_reference import IntegerReference


@settings(max_examples=30)
@given(
    channels=st.integers(1, 4),
    kernel=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    size=st.tuples(st.integers(4, 8), st.integers(4, 8)).map(lambda s: (2 * s[0], 2 * s[1])),
    seed=st.integers(0, 9),
)
def test_output_is_unchanged_for_any_kernel_and_padding(channels, kernel, pads, size, seed):
    model = first_layer(channels, kernel, list(pads), size, seed=seed)
    count, other = rewritten_by(stem.apply, model)
    x = np.random.default_rng(seed).normal(0, 2, (2, channels, *size)).astype(np.float32)
    assert count == 1
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(ReferenceEvaluator(other).run(None, {"x": x})[0], expected, atol=0.2 + 1e-6)
    np.testing.assert_array_equal(IntegerReference(other).run({"x": x})[0], IntegerReference(model).run({"x": x})[0])


def test_onnx_runtime_gives_the_same_integers_and_fuses_the_convolution(tmp_path):
    model = first_layer(3, (3, 3), [1, 1, 1, 1], (32, 32))
    _, other = rewritten_by(stem.apply, model)
    x = np.random.default_rng(1).normal(0, 2, (4, 3, 32, 32)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    (found,), kernels = run(other, {"x": x}, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert "QLinearConv" in kernels
    assert "SpaceToDepth" in kernels
    assert "Conv" not in kernels


@pytest.mark.parametrize(
    "changes",
    [{"stride": 1}, {"channels": 5}, {"size": (31, 32)}, {"kernel": (1, 1), "pads": [0, 0, 0, 0]}],
    ids=["stride 1", "many channels", "odd size", "pointwise"],
)
def test_leaves_every_other_convolution_alone(changes):
    options = {"channels": 3, "kernel": (3, 3), "pads": [1, 1, 1, 1], "size": (32, 32)} | changes
    model = first_layer(**options)
    count, other = rewritten_by(stem.apply, model)
    assert count == 0
    assert [node.op_type for node in other.graph.node] == [node.op_type for node in model.graph.node]
