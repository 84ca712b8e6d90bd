from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qtool.errors import QtoolError, UsageError
from qtool.runtimes import RUNTIMES, open_session
from qtool.runtimes.base import Kernel, TensorInfo, arithmetic, check_feeds, is_compute


def info(**changes):
    return TensorInfo(**{"name": "x", "dtype": "float32", "shape": ("N", 3, None), **changes})


def test_feeds_that_fit_are_accepted():
    check_feeds("model", [info()], {"x": np.zeros((5, 3, 7), np.float32)})


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, "no 'x'"),
        ({"x": np.zeros((1, 3, 2), np.float32), "z": np.zeros(1)}, "also 'z'"),
        ({"x": np.zeros((1, 3, 2))}, "got float64"),
        ({"x": np.zeros((1, 4, 2), np.float32)}, "got float32[1, 4, 2]"),
        ({"x": np.zeros((3, 2), np.float32)}, "expected float32[N, 3, ?]"),
    ],
)
def test_feeds_that_do_not_fit_are_named(feeds, words):
    with pytest.raises(QtoolError) as caught:
        check_feeds("model", [info()], feeds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("op", "multiplies"),
    [
        ("Conv", True), ("QLinearConv", True), ("ConvInteger", True), ("QGemm", True), ("FusedConv", True),
        ("QLinearMatMul", True), ("MatMulNBits", True), ("MultiHeadAttention", True), ("FullyConnected", True),
        ("mkl::_mkl_linear", True), ("mkldnn::_linear_pointwise", True), ("onednn::qlinear_pointwise", True),
        ("aten::addmm", True), ("aten::_int_mm", True), ("aten::add", False), ("aten::comm", False),
        ("Convert", False), ("QuantizeLinear", False), ("DequantizeLinear", False), ("QLinearAdd", False),
        ("Transpose", False), ("QLinearGlobalAveragePool", False), ("ReorderInput", False),
    ],
)  # fmt: skip
def test_multiplying_operations_are_told_from_the_rest(op, multiplies):
    assert is_compute(op) is multiplies


def test_arithmetic_counts_only_multiplying_operations():
    kernels = [Kernel("a", "Conv", "int8", "p"), Kernel("b", "Gemm", "int8", "p"), Kernel("c", "Add", "float32", "p")]
    assert arithmetic([*kernels, Kernel("d", "MatMul", "float32", "p")]) == {"int8": 2, "float32": 1}


def test_an_unknown_provider_is_a_usage_error_with_the_nearest_name(tmp_path: Path):
    with pytest.raises(UsageError, match="did you mean 'tensorrt'"):
        open_session(tmp_path / "m.onnx", provider="tensort")


def test_no_threads_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match="threads"):
        open_session(tmp_path / "m.onnx", threads=0)


@pytest.mark.parametrize("provider", sorted(RUNTIMES))
def test_a_missing_file_is_told_before_any_runtime_is_needed(tmp_path: Path, provider: str):
    with pytest.raises(QtoolError, match="no such file"):
        open_session(tmp_path / "absent.onnx", provider=provider)


def test_a_folder_is_no_model(tmp_path: Path):
    with pytest.raises(QtoolError, match="a folder"):
        open_session(tmp_path)
