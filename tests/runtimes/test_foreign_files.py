"""What sessions make of inputs and outputs that no exporter here writes: text, lists, formats that numpy lacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnx.parser
import pytest

from qtool.errors import QtoolError
from qtool.runtimes import open_session
from qtool.runtimes.ort_errors import cure, reason

RUNTIMES = [
    "cpu",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
    ),
]
CLASSIFIER = """agraph (float[N, 4] x) => (string[N] label, float[N, 2] scores, seq(map(int64, float[N])) chances)
    { label, scores = ai.onnx.ml.LinearClassifier <classlabels_strings = ["a", "b"], post_transform = "SOFTMAX",
                      coefficients = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], intercepts = [0.0, 0.0]> (x)
      chances = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (scores) }"""


def saved(graph: str, folder: Path) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> {graph}')
    onnx.save(model, folder / "foreign.onnx")
    return folder / "foreign.onnx"


def test_outputs_that_are_text_or_dicts_are_computed_and_those_of_numbers_given(tmp_path):
    session = open_session(saved(CLASSIFIER, tmp_path))
    assert [info.name for info in session.outputs] == ["scores"]
    assert session.others == ("'label' (tensor(string))", "'chances' (seq(map(int64,tensor(float))))")
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    session.prepare({"x": x})()
    (scores,) = session.run({"x": x})
    powers = np.exp(x[:, :2])
    np.testing.assert_allclose(scores, powers / powers.sum(1, keepdims=True), rtol=1e-5)


def test_numbers_come_in_numpys_own_types(tmp_path):
    (y,) = open_session(saved("g (float[N] x) => (uint64[N] y) { y = Cast <to = 13> (x) }", tmp_path)).run(
        {"x": np.array([3], np.float32)}
    )
    assert y.dtype.num == np.dtype(np.uint64).num
    assert y.tolist() == [3]


@pytest.mark.parametrize("provider", RUNTIMES)
@pytest.mark.parametrize("kind", ["bfloat16", "float8e5m2", "int4"])
@pytest.mark.parametrize("read", [True, False])
def test_numbers_that_numpy_lacks_are_not_taken_for_others(kind, read, provider, tmp_path):
    ours, theirs = (kind, "float") if read else ("float", kind)
    to = onnx.TensorProto.DataType.Value(theirs.upper())
    path = saved(f"g ({ours}[N, 4] x) => ({theirs}[N, 4] y) {{ y = Cast <to = {to}> (x) }}", tmp_path)
    with pytest.raises(QtoolError, match=rf"'{'x' if read else 'y'}': expected .* that numpy has; got"):
        open_session(path, provider=provider)


@pytest.mark.parametrize("provider", RUNTIMES)
def test_a_run_that_is_given_up_is_one_line(provider, tmp_path):
    path = saved("g (float[N, 4] x, float[A, B] w) => (float[N, B] y) { y = MatMul (x, w) }", tmp_path)
    session, feeds = open_session(path, provider=provider), {"x": np.ones((1, 4), np.float32)}
    feeds["w"] = np.ones((3, 2), np.float32)
    if provider == "openvino":  # which computes something of these
        session._request = Mock(infer=Mock(side_effect=RuntimeError("Exception from src/a.cpp:75:\nno such sizes\n")))
    for compute in (lambda: session.run(feeds), session.prepare(feeds)):
        with pytest.raises(QtoolError, match=r"to compute it; got .*; check the model, and .* 'w' float32\[") as caught:
            compute()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        ("g (float[N] x) => (float[N] y) { y = Relu <foo = 3> (x) }", r"attribute: foo .*; export with the opset that"),
        ("g (float[N] x) => (int64[N] y) { y = Relu (x) }", r"check_model\(path, full_check=True\)"),
        ("g (int16[N] x) => (int16[N] y) { y = Max (x, x) }", "Max.*; write it with operators, and types of numbers"),
        ("g (float[N] x) => (float[N] y) { y = acme.Foo (x) }", "No opset import for domain 'acme'; export it again"),
        (
            "g (float[T, 1, 4] x, float[1, 8, 4] w, float[1, 8, 2] r) => (float y) "
            "{ y, h, c = LSTM <hidden_size = 2, layout = 1> (x, w, r) }",
            "layout == 1.*; leave what ONNX Runtime refuses out",
        ),
    ],
)
def test_what_to_do_fits_what_is_wrong(graph, told, tmp_path):
    with pytest.raises(QtoolError, match=told):
        open_session(saved(graph, tmp_path))


def test_a_file_of_an_opset_before_all_that_is_supported_is_to_be_converted(tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["": 6]> g (float[N] x) => (float[N] y) {y = Add(x, x)}'
    )
    onnx.save(model, tmp_path / "old.onnx")
    with pytest.raises(QtoolError, match=r"Add\(6\).*; convert it to opset 7 or later"):
        open_session(tmp_path / "old.onnx")


def test_of_an_opset_to_come_the_last_one_that_is_supported_is_told():
    error = RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : Load model from a.onnx failed:/src/onnxruntime/core/graph/utils.h:46 "
        "void onnxruntime::model_load_utils::ValidateOpsetForDomain(const int&) ONNX Runtime only *guarantees* support "
        "for models stamped with official released onnx opset versions. Opset 99 is under development and support for "
        "this is limited. The operator schemas and or other functionality may change before next ONNX release and in "
        "this case ONNX Runtime will not guarantee backward compatibility. Current official support for domain ai.onnx "
        "is till opset 26."
    )
    assert reason(error).startswith("Opset 99 is under development")
    assert reason(error).endswith("till opset 26.")
    assert cure(error).startswith("export with a lower opset")


def test_a_message_of_nothing_but_a_code_is_that():
    assert reason(RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : ")) == "NOT_IMPLEMENTED"
    nested = "[ONNXRuntimeError] : 1 : FAIL : Load model from a.onnx failed:[ONNXRuntimeError] : 1 : FAIL : no output"
    assert reason(RuntimeError(nested)) == "no output"
