from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from qtool.exporting.baselines import overflowing, write_fp16

LIMIT = np.finfo(np.float32).max


def _masked_softmax(path: Path, mask: list[float]) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "mask"], ["sum"]), helper.make_node("Softmax", ["sum"], ["y"])],
        "masked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", len(mask)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", len(mask)])],
        [numpy_helper.from_array(np.array(mask, np.float32), "mask")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), str(path))
    return path


@pytest.mark.parametrize("hidden", [-LIMIT, -np.inf])
def test_a_mask_of_float32s_limit_hides_as_much_in_half(tmp_path: Path, hidden: float) -> None:
    single, half = _masked_softmax(tmp_path / "single.onnx", [0, hidden, 0]), tmp_path / "half.onnx"
    assert write_fp16(single, half) == []
    x = np.array([[1.0, 30.0, 2.0]], np.float32)
    expected, found = (onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0] for path in (single, half))
    assert found[0, 1] == expected[0, 1] == 0
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(("value", "named"), [(65504.0, []), (65536.0, ["mask"]), (-1e30, ["mask"]), (LIMIT, [])])
def test_a_constant_beyond_half_is_named_and_nothing_is_written(tmp_path: Path, value: float, named: list[str]) -> None:
    single = _masked_softmax(tmp_path / "single.onnx", [0, value])
    assert overflowing(onnx.load(str(single))) == named
    assert write_fp16(single, tmp_path / "half.onnx") == named
    assert (tmp_path / "half.onnx").exists() is not bool(named)
