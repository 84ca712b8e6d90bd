"""The pass changes no output: the same integers in ONNX Runtime, and in the ONNX reference's own arithmetic."""

import numpy as np
import onnx
import pytest
import qdq_files
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import rewritten_by, run

from qtool.exporting.passes import even_inputs
from qtool.exporting.reference.integer_reference import IntegerReference


def first_layer(*args, outputs=16, **options):
    return qdq_files.first_layer(*args, **options, outputs=outputs)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """The files here are one layer, of which zeros are more than a fiftieth."""
    monkeypatch.setattr(even_inputs, "MOST_GROWTH", 5.0)


@settings(max_examples=30)
@given(
    channels=st.integers(2, 15).filter(lambda c: c % 4),
    kernel=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    stride=st.integers(1, 3),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    seed=st.integers(0, 9),
)
def test_output_is_unchanged_for_any_kernel_padding_and_stride(channels, kernel, pads, stride, size, seed):
    model = first_layer(channels, kernel, list(pads), size, stride, seed)
    count, other = rewritten_by(even_inputs.apply, model)
    x = np.random.default_rng(seed).normal(0, 2, (2, channels, *size)).astype(np.float32)
    assert count == 1
    onnx.checker.check_model(other, full_check=True)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(ReferenceEvaluator(other).run(None, {"x": x})[0], expected, atol=0.2 + 1e-6)
    np.testing.assert_array_equal(IntegerReference(other).run({"x": x})[0], IntegerReference(model).run({"x": x})[0])


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_onnx_runtime_gives_the_same_integers_and_fuses_the_convolution(channels, tmp_path):
    model = first_layer(channels, (3, 3), [1, 1, 1, 1], (17, 16), stride=1)
    _, other = rewritten_by(even_inputs.apply, model)
    x = np.random.default_rng(1).normal(0, 2, (4, channels, 17, 16)).astype(np.float32)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    (found,), kernels = run(other, {"x": x}, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert {"QLinearConv", "Pad"} <= set(kernels)
    assert "Conv" not in kernels


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": 4}, {"channels": 17}, {"kernel": (1, 1), "pads": [0, 0, 0, 0]},
        {"channels": 1, "kernel": (5, 5), "pads": [2, 2, 2, 2]}, {"outputs": 15},
    ],
    ids=["a whole word", "many channels", "pointwise", "one channel under a large kernel", "few outputs"],
)  # fmt: skip
def test_leaves_every_other_convolution_alone(changes):
    options = {"channels": 3, "kernel": (3, 3), "pads": [1, 1, 1, 1], "size": (32, 32), "stride": 1} | changes
    model = first_layer(**options)
    count, other = rewritten_by(even_inputs.apply, model)
    assert count == 0
    assert [node.op_type for node in other.graph.node] == [node.op_type for node in model.graph.node]


def test_leaves_layers_behind_the_first_alone():
    model = first_layer(3, (3, 3), [1, 1, 1, 1], (32, 32), stride=1)
    model.graph.input[0].name = "image"
    model.graph.node.insert(0, onnx.helper.make_node("Relu", ["image"], ["x"]))
    assert rewritten_by(even_inputs.apply, model)[0] == 0


def test_a_file_grows_by_a_fiftieth_at_most(monkeypatch):
    monkeypatch.setattr(even_inputs, "MOST_GROWTH", 0.02)
    assert rewritten_by(even_inputs.apply, first_layer(3, (3, 3), [1, 1, 1, 1], (32, 32), stride=1))[0] == 0


@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize("operators", [("QuantizeLinear",), ("Add", "QuantizeLinear"), ("QuantizeLinear", "Pad"), ()])
def test_an_image_of_bytes_is_filled_up_too(operators, channels, tmp_path):
    read = channels + ("Pad" in operators)
    model = first_layer(read, (3, 3), [1, 1, 1, 1], (12, 12), stride=1)
    graph, random = model.graph, np.random.default_rng(0)
    stored = {
        "shift": random.uniform(0, 0.01, (channels, 1, 1)).astype(np.float32), "full": np.uint8(140),
        "scales": random.uniform(0.02, 0.04, channels).astype(np.float32),
        "zeros": random.integers(100, 130, channels).astype(np.uint8),
        "amounts": np.array([0, 0, 0, 0, 0, 1, 0, 0], np.int64),
    }  # fmt: skip
    operands = {"Add": ["shift"], "QuantizeLinear": ["scales", "zeros"], "Pad": ["amounts", "full"]}
    value = "x"
    quantize = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    dequantize = next(node for node in graph.node if quantize.output[0] in node.input)
    graph.node.remove(quantize)
    for place, kind in enumerate(operators):
        axis = {"axis": 1} if kind == "QuantizeLinear" else {}
        node = onnx.helper.make_node(kind, [value, *operands[kind]], [value := f"{kind}_of"], **axis)
        graph.node.insert(place, node)
    dequantize.input[0] = value
    graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    kind = onnx.TensorProto.FLOAT if operators else onnx.TensorProto.UINT8
    graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", kind, ["n", channels, 12, 12]))
    del graph.value_info[:]
    model = onnx.shape_inference.infer_shapes(model)
    count, other = rewritten_by(even_inputs.apply, model)
    assert count == (read != 4)
    onnx.checker.check_model(other, full_check=True)
    x = random.normal(0, 2, (2, channels, 12, 12)).astype(np.float32)
    x = x if operators else random.integers(0, 256, x.shape, dtype=np.uint8)
    (expected,), _ = run(model, {"x": x}, tmp_path)
    (found,), kernels = run(other, {"x": x}, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert "QLinearConv" in kernels
