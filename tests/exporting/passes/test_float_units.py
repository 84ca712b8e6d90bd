"""A layer left in float stays in float in ONNX Runtime, and the file computes what it did."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder

from qtool.exporting.passes import float_units
from qtool.runtimes.ort import OrtSession, optimized_graph

SHAPES = {"Conv": (6, 4, 3, 3), "ConvTranspose": (4, 6, 3, 3), "Gemm": (4, 6)}
OUTPUTS = {"Conv": (6, 1, 1, 1), "ConvTranspose": (1, 6, 1, 1), "Gemm": (1, 6)}


def between_quantizers(op, *activations):
    """A quantizer, a float layer with badly scaled channels, activations, a quantizer, and the way back to float."""
    builder, rng = Builder(), np.random.default_rng(0)
    weight = (rng.normal(size=SHAPES[op]) * np.geomspace(0.001, 1, 6).reshape(OUTPUTS[op])).astype(np.float32)
    x = builder.pair(builder.input("x", [2, 4] if op == "Gemm" else [2, 4, 5, 5]), 0.02, 128)
    y = builder.op(op, x, builder.constant(weight), builder.constant(rng.normal(size=6).astype(np.float32)))
    for activation in activations:
        limits = [builder.constant(np.float32(limit)) for limit in ((-1, 1) if activation == "Clip" else ())]
        y = builder.op(activation, y, *limits)
    return builder.model(builder.pair(y, 0.02, 128))


def guarded(model):
    changed = ir.serde.deserialize_model(model)
    return float_units.apply(changed), ir.serde.serialize_model(changed)


def in_runtime(model, path):
    """The stored int8 weights of the optimised graph."""
    onnx.save(model, path)
    return [
        t.name for t in optimized_graph(path).graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) > 1
    ]


@pytest.mark.parametrize("activations", [(), ("Relu",), ("Clip",), ("Relu", "Clip")])
@pytest.mark.parametrize("op", SHAPES)
def test_the_runtime_quantizes_such_a_layer_by_itself_unless_guarded(op, activations, tmp_path):
    model = between_quantizers(op, *activations)
    count, other = guarded(model)
    assert count == 1
    assert in_runtime(model, tmp_path / "bare.onnx")  # without this, the pass has no reason to be
    assert not in_runtime(other, tmp_path / "guarded.onnx")
    onnx.checker.check_model(other, full_check=True)


@pytest.mark.parametrize("op", SHAPES)
def test_the_identity_changes_no_number(op):
    model = between_quantizers(op, "Relu")
    x = np.random.default_rng(1).normal(size=[d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])
    feeds = {"x": x.astype(np.float32)}
    want, got = (ReferenceEvaluator(m).run(None, feeds)[0] for m in (model, guarded(model)[1]))
    np.testing.assert_array_equal(want, got)


def test_layers_in_no_danger_are_left_alone():
    for activation in ("Sigmoid", "HardSwish"):
        assert guarded(between_quantizers("Conv", activation))[0] == 0
    to_float = between_quantizers("Conv")
    layer = next(node for node in to_float.graph.node if node.op_type == "Conv")
    del to_float.graph.node[list(to_float.graph.node).index(layer) + 1 :]
    to_float.graph.output[0].name = layer.output[0]
    assert guarded(to_float)[0] == 0


def test_a_softmax_of_small_steps_is_computed_in_float(tmp_path):
    builder = Builder()
    x = builder.pair(builder.input("x", [2, 49]), 0.02, 128)
    model = builder.model(builder.pair(builder.op("Softmax", x), 8e-5, 0))
    count, other = guarded(model)
    assert count == 1
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 49)).astype(np.float32)}
    wanted = ReferenceEvaluator(model).run(None, feeds)[0]
    found = {}
    for name, one in (("bare", model), ("guarded", other)):
        onnx.save(one, tmp_path / f"{name}.onnx")
        found[name] = OrtSession(tmp_path / f"{name}.onnx").run(feeds)[0]
    wrong = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32)  # which alone is why the pass is there
    assert (np.abs(found["bare"] - wanted).max() > 20 * 8e-5) == wrong
    np.testing.assert_allclose(found["guarded"], wanted, atol=8.1e-5)


def maxima(*between, rounded=True):
    """A maximum of what a float operator gives, operators behind it, and a quantizer."""
    builder = Builder()
    y = builder.op("Sin", builder.input("x", [2, 4, 8, 8]))
    y = builder.op("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0])
    for operator in between:
        y = builder.op(operator, y, **({"perm": [0, 1, 3, 2]} if operator == "Transpose" else {}))
    return builder.model(builder.pair(y, 0.01, 100) if rounded else y)


def order_in_runtime(model, path):
    """The maximum and the quantizer, as the optimised graph has them."""
    onnx.save(model, path)
    return [node.op_type for node in optimized_graph(path).graph.node if node.op_type in ("MaxPool", "QuantizeLinear")]


@pytest.mark.parametrize("between", [(), ("Transpose",)])
def test_a_maximum_of_floats_is_taken_before_they_are_quantized(between, tmp_path):
    model = maxima(*between)
    count, other = guarded(model)
    assert count == 1
    assert order_in_runtime(model, tmp_path / "bare.onnx") == ["QuantizeLinear", "MaxPool"]  # why the pass is there
    assert order_in_runtime(other, tmp_path / "guarded.onnx") == ["MaxPool", "QuantizeLinear"]
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 4, 8, 8)).astype(np.float32)}
    wanted = ReferenceEvaluator(model).run(None, feeds)[0]
    np.testing.assert_array_equal(ReferenceEvaluator(other).run(None, feeds)[0], wanted)
    np.testing.assert_array_equal(OrtSession(tmp_path / "guarded.onnx").run(feeds)[0], wanted)


def test_maxima_of_integers_and_those_read_in_float_stay_as_they_are():
    assert guarded(maxima(rounded=False))[0] == 0
    assert guarded(maxima("Sin"))[0] == 0
    builder = Builder()
    x = builder.pair(builder.input("x", [2, 4, 8, 8]), 0.01, 100)
    pooled = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    assert guarded(builder.model(builder.pair(pooled, 0.01, 100)))[0] == 0
