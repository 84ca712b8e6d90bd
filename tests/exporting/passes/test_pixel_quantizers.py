"""One quantizer by channel gives the integers of the operators that it stands for, in ONNX and in a runtime."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from qdq_files import rewritten_by, run

from qtool.exporting.passes import pixels


def file_of(
    channels, shift, zero, *, scale=1.0, kind=np.uint8, offsets=None, seed=0, read_twice=False, inside=None, step=None,
    image=TensorProto.FLOAT,
):  # fmt: skip
    """Numbers for each channel, a channel more or none, a quantizer for all of them, and the way back."""
    random = np.random.default_rng(seed)
    column = (channels, 1, 1)
    offsets = random.integers(-zero, 256 - zero, channels) if offsets is None else offsets
    scales = random.uniform(0.01, 0.1, column) if step is None else np.full(column, step)
    constants = {
        "h": np.full(column, shift, np.float32), "s": scales.astype(np.float32),
        "o": np.array(offsets, np.float32).reshape(column), "one": np.float32(scale), "z": kind(zero),
    }  # fmt: skip
    parts = [("Add", ["x", "h"]), ("Div", ["0", "s"]), ("Round", ["1"]), ("Add", ["2", "o"])]
    nodes = [helper.make_node(op, inputs, [str(index)]) for index, (op, inputs) in enumerate(parts)]
    if image != TensorProto.FLOAT:
        nodes[0].input[0] = "floats"
        nodes.insert(0, helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT))
    whole = "3"
    if inside is not None:
        constants |= {"ends": np.array([0, 0, 0, 0, 0, 1, 0, 0]), "m": np.float32(inside)}
        nodes += [helper.make_node("Pad", [whole, "ends", "m"], [whole := "wide"])]
    nodes += [helper.make_node("QuantizeLinear", [whole, "one", "z"], ["q"], name="input/quantize")]
    nodes += [helper.make_node("DequantizeLinear", ["q", "one", "z"], ["y"])]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", count, 4, 5])
        for name, count in (("y", channels + (inside is not None)), ("3", channels))[: 1 + read_twice]
    ]
    inputs = [helper.make_tensor_value_info("x", image, ["n", channels, 4, 5])]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@settings(max_examples=25, deadline=None)
@given(channels=st.integers(1, 5), shift=st.sampled_from([0.0, 0.01]), zero=st.integers(0, 255), seed=st.integers(0, 9))
def test_the_integers_are_the_same_whatever_is_quantized(channels, shift, zero, seed):
    model = file_of(channels, shift, zero, seed=seed)
    count, other = rewritten_by(pixels.apply, model)
    assert count == 1
    onnx.checker.check_model(other, full_check=True)
    assert [n.op_type for n in other.graph.node] == ["Add"] * bool(shift) + ["QuantizeLinear", "DequantizeLinear"]
    x = np.random.default_rng(seed).normal(0, 3, (2, channels, 4, 5)).astype(np.float32)
    (expected,), (found,) = (ReferenceEvaluator(each).run(None, {"x": x}) for each in (model, other))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_onnx_runtime_gives_the_same_integers(channels, tmp_path):
    model = file_of(channels, 0.01, 114)
    _, other = rewritten_by(pixels.apply, model)
    x = np.random.default_rng(1).normal(0, 3, (4, channels, 4, 5)).astype(np.float32)
    (expected,), (found,) = (run(each, {"x": x}, tmp_path)[0] for each in (model, other))
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=25, deadline=None)
@given(channels=st.integers(1, 4), inside=st.integers(-90, 90), zero=st.integers(0, 255), seed=st.integers(0, 9))
def test_a_channel_of_one_number_is_put_to_the_integers(channels, inside, zero, seed):
    model = file_of(channels, 0.0, zero, seed=seed, inside=inside)
    count, other = rewritten_by(pixels.apply, model)
    assert count == 1
    onnx.checker.check_model(other, full_check=True)
    assert [n.op_type for n in other.graph.node] == ["QuantizeLinear", "Pad", "DequantizeLinear"]
    x = np.random.default_rng(seed).normal(0, 3, (2, channels, 4, 5)).astype(np.float32)
    (expected,), (found,) = (ReferenceEvaluator(each).run(None, {"x": x}) for each in (model, other))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("inside", [None, 20])
@pytest.mark.parametrize(("step", "left"), [(1.0, []), (0.5, ["Cast", "QuantizeLinear"])])
def test_bytes_are_read_as_they_are(step, left, inside):
    model = file_of(3, 0.0, 114, offsets=[-114.0] * 3, image=TensorProto.UINT8, inside=inside, step=step)
    _, other = rewritten_by(pixels.apply, model)
    onnx.checker.check_model(other, full_check=True)
    assert [n.op_type for n in other.graph.node] == [*left, *["Pad"] * bool(inside), "DequantizeLinear"]
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    (expected,), (found,) = (ReferenceEvaluator(each).run(None, {"x": x}) for each in (model, other))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.5},
        {"offsets": [0.5, 0.0, 0.0]},
        {"offsets": [-115.0, 0.0, 0.0]},
        {"offsets": [0.0, 0.0, 142.0]},
        {"kind": np.int8},
        {"read_twice": True},
    ],
    ids=["another scale", "no integer", "below 0", "above 255", "signed", "read twice"],
)
def test_what_is_no_zero_point_stays_a_sum(changes):
    assert rewritten_by(pixels.apply, file_of(3, 0.0, 114, **changes))[0] == 0
