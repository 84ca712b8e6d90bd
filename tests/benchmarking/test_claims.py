from __future__ import annotations

import numpy as np
import onnx
import onnx_files
import pytest
from onnx import helper

from qtool.benchmarking.claims import check_claim, slower_sentence, stored_format


def test_the_stored_format_is_that_of_most_weights(files):
    assert {name: stored_format(path) for name, path in files.items()} == {
        "fp32": "float32", "fp16": "float16", "int8": "int8"
    }  # fmt: skip


def test_weights_in_constant_nodes_count_too(tmp_path):
    value = onnx.numpy_helper.from_array(np.zeros((4, 4), np.float16))
    path = tmp_path / "c.onnx"
    onnx.save(
        onnx_files.model([helper.make_node("Constant", [], ["y"], value=value)], {}, {"y": [4, 4]}, dtype=10), path
    )
    assert stored_format(path) == "float16"


def test_no_weights_no_format(tmp_path):
    path = tmp_path / "r.onnx"
    onnx.save(onnx_files.model([helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, {"y": [4]}), path)
    assert stored_format(path) is None
    assert stored_format(tmp_path / "m.pt2") is None


@pytest.mark.parametrize(
    ("stored", "ran", "words"),
    [
        ("float16", {"float32": 5}, "float16 is storage only on cpu; all 5"),
        ("int8", {"float32": 5}, "not INT8 arithmetic on cpu"),
        ("int8", {"int8": 4, "float32": 1}, "4 of 5 multiplying operations ran in int8, 1 in float32"),
        ("int8", {"int8": 5}, None),
        ("float16", {"float16": 5}, None),
        ("float32", {"float32": 5}, None),
        ("float32", {"bfloat16": 5}, None),
        ("int8", {}, None),
        (None, {"float32": 1}, None),
    ],
)
def test_a_claim_is_held_against_what_ran(stored, ran, words):
    told = check_claim("m", stored, ran, "cpu")
    assert (words in told) if words else told is None


@pytest.mark.parametrize(("interval", "slower"), [([0.8, 0.95], True), ([0.95, 1.1], True), ([1.1, 1.2], False)])
def test_not_faster_beyond_doubt_is_said(interval, slower):
    entry = {"speedup": sum(interval) / 2, "speedup_ci95": interval, "batch_size": 4}
    told = slower_sentence("int8", "fp32", entry, {"int8": 1, "float32": 2})
    assert (told is not None) is slower
    if told:
        assert "at batch size 4" in told
        assert "2 of 3 multiplying operations run in float" in told
