"""Naming gives every operator its module's path and every value a name of its own, and changes no number."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder

from qtool.exporting.passes import names


def net(layers: int, outputs: int) -> tuple[onnx.ModelProto, list[str]]:
    """Quantized convolutions in a row, the last ``outputs`` of which leave the graph; and their values' names."""
    b = Builder()
    x, values = b.pair(b.input("x", ["n", 3, 6, 6]), 0.05, 120), []
    for _ in range(layers):
        conv = b.op("Conv", x, b.weight(3, 3, 1, 1), b.bias(0.05))
        x = b.pair(b.op("Relu", conv), 0.05, 0)
        values.append(x)
    return b.model(*values[-outputs:]), values


def applied(model: onnx.ModelProto, unit_names: list[str]) -> onnx.ModelProto:
    """The model with its n-th convolution and all that follows up to the next called after ``unit_names[n]``."""
    units, current = {}, "x"
    pending = iter(unit_names)
    for node in model.graph.node:
        if node.op_type == "Conv":
            current = next(pending)
        units[node.output[0]] = current
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # the intermediate form shares tensors with what it was read from
    renamed = ir.serde.deserialize_model(copy)
    names.apply(renamed, units)
    return ir.serde.serialize_model(renamed)


paths = st.sampled_from(["a", "a.b", "layer1.0.conv", "x", "output", "output_0", "a/quantized"])


@settings(max_examples=40, derandomize=True, database=None)
@given(unit_names=st.lists(paths, min_size=1, max_size=3), outputs=st.integers(1, 2), batch=st.integers(1, 2))
def test_only_names_change_and_each_is_unique(unit_names: list[str], outputs: int, batch: int) -> None:
    model, _ = net(len(unit_names), min(outputs, len(unit_names)))
    renamed = applied(model, unit_names)
    onnx.checker.check_model(renamed, full_check=True)
    assert [n.op_type for n in renamed.graph.node] == [n.op_type for n in model.graph.node]
    assert [[(a.name, a.i) for a in n.attribute] for n in renamed.graph.node] == [
        [(a.name, a.i) for a in n.attribute] for n in model.graph.node
    ]
    values = [name for node in renamed.graph.node for name in node.output]
    stored = [tensor.name for tensor in renamed.graph.initializer]
    assert len({*values, *stored, "x"}) == len(values) + len(stored) + 1
    assert len({node.name for node in renamed.graph.node}) == len(renamed.graph.node)
    x = np.random.default_rng(0).normal(size=(batch, 3, 6, 6)).astype(np.float32)
    for want, got in zip(*(ReferenceEvaluator(m).run(None, {"x": x}) for m in (model, renamed)), strict=True):
        np.testing.assert_array_equal(want, got)


def test_names_are_what_a_reader_expects() -> None:
    model, _ = net(2, 1)
    renamed = applied(model, ["block.conv", "head"])
    nodes = {node.name: node.op_type for node in renamed.graph.node}
    expected = {
        "x/quantize": "QuantizeLinear", "block.conv": "Conv", "block.conv/relu": "Relu",
        "block.conv/quantize": "QuantizeLinear", "block.conv/dequantize": "DequantizeLinear",
        "block.conv/weight/dequantize": "DequantizeLinear", "block.conv/bias/dequantize": "DequantizeLinear",
        "head": "Conv", "head/relu": "Relu",
    }  # fmt: skip
    assert expected.items() <= nodes.items()
    stored = {tensor.name for tensor in renamed.graph.initializer}
    assert {"block.conv/weight", "block.conv/weight_scale", "head/bias", "head/bias_scale"} <= stored
    assert [value.name for value in renamed.graph.output] == ["output"]
    assert [value.name for value in renamed.graph.input] == ["x"]


def test_several_outputs_are_numbered_in_order() -> None:
    model, values = net(3, 2)
    renamed = applied(model, ["a", "b", "c"])
    assert [value.name for value in renamed.graph.output] == ["output_0", "output_1"]
    assert values[-2:] == [value.name for value in model.graph.output]


def test_what_keeps_its_name_shares_it_with_no_module() -> None:
    """Operators that the exporter writes as functions have nodes and values of names such as n1 and tmp, inlined."""
    model, _ = net(3, 1)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    convolutions[0].name = "n1"
    units = {convolutions[1].output[0]: "n1", convolutions[2].output[0]: convolutions[0].output[0]}
    renamed = ir.serde.deserialize_model(model)
    names.apply(renamed, units)
    onnx.checker.check_model(made := ir.serde.serialize_model(renamed), full_check=True)
    assert [node.name for node in made.graph.node if node.op_type == "Conv"][:2] == ["n1/other", "n1"]
