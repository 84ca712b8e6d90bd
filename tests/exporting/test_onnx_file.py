"""A file written tensor by tensor is the model that onnx's own writer would have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from qtool.exporting import onnx_file

SIZES = [1, 127, 128, 1024, 1025, 5000, 300_000]


def _model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    arrays = {f"w{size}": rng.normal(size=size).astype(np.float32) for size in SIZES}
    arrays |= {"bytes": rng.integers(-128, 128, (70, 80)).astype(np.int8), "half": np.ones((50, 60), np.float16)}
    tensors = [numpy_helper.from_array(value, name) for name, value in arrays.items()]
    tensors.append(helper.make_tensor("four", TensorProto.INT4, [10_001], rng.integers(-8, 8, 10_001)))
    tensors.append(helper.make_tensor("text", TensorProto.STRING, [2], [b"a" * 9000, b"b"]))
    nodes = [helper.make_node("Identity", [tensor.name], [f"{tensor.name}.out"]) for tensor in tensors]
    outputs = [helper.make_tensor_value_info(f"{t.name}.out", t.data_type, list(t.dims)) for t in tensors]
    graph = helper.make_graph(nodes, "g", [], outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(model, {"key": "value"})
    return model


def test_what_is_written_is_the_model(tmp_path: Path) -> None:
    expected, path = _model(), tmp_path / "model.onnx"
    model = ir.from_proto(expected)
    onnx_file.write(model, path)
    found = onnx.load(path)
    onnx.checker.check_model(found, full_check=True)
    assert {p.key: p.value for p in found.metadata_props} == {"key": "value"}
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in expected.graph.node]
    stored = {tensor.name: tensor for tensor in found.graph.initializer}
    assert len(stored) == len(expected.graph.initializer)
    for tensor in expected.graph.initializer:
        got, want = (numpy_helper.to_array(t) for t in (stored[tensor.name], tensor))
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)


def test_the_model_is_whole_after_writing_and_after_a_failure(tmp_path: Path) -> None:
    model = ir.from_proto(_model())
    onnx_file.write(model, tmp_path / "first.onnx")
    with pytest.raises(FileNotFoundError):
        onnx_file.write(model, tmp_path / "missing" / "model.onnx")
    onnx_file.write(model, tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**31, 2**35 + 5])
def test_lengths_are_read_back(value: int) -> None:
    data = onnx_file._varint(value)
    assert sum((byte & 127) << (7 * i) for i, byte in enumerate(data)) == value
    assert [byte > 127 for byte in data] == [True] * (len(data) - 1) + [False]
