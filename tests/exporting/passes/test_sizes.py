"""Open sizes have names that say what they are, wherever they stand."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from qtool.exporting.passes import sizes

Sizes = list[str | int]


def renamed(inputs: dict[str, Sizes], output: Sizes) -> tuple[int, dict[str, Sizes]]:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, output)
    node = helper.make_node("Max", list(inputs), ["y"])
    model = ir.serde.deserialize_model(helper.make_model(helper.make_graph([node], "g", values, [result])))
    count = sizes.apply(model)
    graph = ir.serde.serialize_model(model).graph
    return count, {value.name: _sizes(value) for value in (*graph.input, *graph.output)}


def _sizes(value: onnx.ValueInfoProto) -> Sizes:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_the_batch_and_the_axes_behind_it() -> None:
    count, found = renamed({"x": ["s77", 3, "s53", "s0"]}, ["s77", 4, "4*((s53//4))", "2*s0 + 1"])
    assert count == 3
    assert found == {"x": ["batch", 3, "axis_2", "axis_3"], "y": ["batch", 4, "4*((axis_2//4))", "2*axis_3 + 1"]}


def test_inputs_share_the_batch_and_a_length_of_its_own_has_the_inputs_name() -> None:
    _, found = renamed({"a": ["s1", "s2"], "b": ["s10", "s2"], "c": ["s3", "s4"]}, ["s1", "s2 + s4"])
    assert found["a"] == found["b"] == ["batch", "axis_1"]
    assert found["c"] == ["batch", "c_axis_1"]
    assert found["y"] == ["batch", "axis_1 + c_axis_1"]


def test_what_the_data_decide_and_names_of_others_stay() -> None:
    count, found = renamed({"x": ["s1", 2], "y2": ["tokens", 2]}, ["u0", "s1"])
    assert count == 1
    assert found == {"x": ["batch", 2], "y2": ["tokens", 2], "y": ["u0", "batch"]}


def test_a_size_that_the_model_fixes_is_a_number() -> None:
    count, found = renamed({"x": ["s1", "4", "s2"]}, ["s1", "4", "s2 + 1"])
    assert (count, found) == (2, {"x": ["batch", 4, "axis_2"], "y": ["batch", 4, "axis_2 + 1"]})
