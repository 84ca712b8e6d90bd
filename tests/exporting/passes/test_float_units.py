"""A layer left in float stays in float in ONNX Runtime, and the file computes what it did."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from qtool.exporting.passes import float_units
from qtool.runtimes.ort import optimized_graph

SHAPES = {"Conv": (6, 4, 3, 3), "ConvTranspose": (4, 6, 3, 3), "Gemm": (4, 6)}
OUTPUTS = {"Conv": (6, 1, 1, 1), "ConvTranspose": (1, 6, 1, 1), "Gemm": (1, 6)}


def between_quantizers(op, *activations):
    """A quantizer, a float layer, activations, a quantizer, and the way back to float."""
    rng = np.random.default_rng(0)
    constants = {
        "s": np.float32(0.02), "z": np.uint8(128), "low": np.float32(-1), "high": np.float32(1),
        "w": rng.normal(size=SHAPES[op]).astype(np.float32) * np.geomspace(0.001, 1, 6).reshape(OUTPUTS[op]),
        "b": rng.normal(size=6).astype(np.float32),
    }  # fmt: skip
    constants["w"] = constants["w"].astype(np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "s", "z"], ["x_d"]),
        helper.make_node(op, ["x_d", "w", "b"], ["y0"], name="layer"),
    ]
    for i, activation in enumerate(activations):
        extra = ["low", "high"] if activation == "Clip" else []
        nodes.append(helper.make_node(activation, [f"y{i}", *extra], [f"y{i + 1}"]))
    nodes += [
        helper.make_node("QuantizeLinear", [f"y{len(activations)}", "s", "z"], ["y_q"]),
        helper.make_node("DequantizeLinear", ["y_q", "s", "z"], ["y"]),
    ]
    shape = [2, 4] if op == "Gemm" else [2, 4, 5, 5]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


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
    del to_float.graph.node[3:]
    to_float.graph.output[0].name = "y0"
    assert guarded(to_float)[0] == 0
