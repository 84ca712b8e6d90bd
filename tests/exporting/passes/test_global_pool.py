"""A mean over all spatial axes between integers becomes a pooling that the runtime has in integers; others stay."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, rewritten_by, run

from qtool.exporting.passes import global_pool


def mean(shape: tuple[int, ...], axes: list[int], keep: bool, readers: int = 1, after: str = "") -> onnx.ModelProto:
    """x → pair → ReduceMean → quantizers, each with a dequantizer (and an operator) behind it."""
    b = Builder()
    x = b.pair(b.input("x", ["n", *shape[1:]]), 0.04, 100)
    pooled = b.op("ReduceMean", x, b.constant(axes, np.int64), keepdims=int(keep))
    ends = [b.pair(pooled, 0.01 * (i + 1), 110 + i) for i in range(readers)]
    return b.model(*[b.op(after, end) if after else end for end in ends])


applied = functools.partial(rewritten_by, global_pool.apply)


def outputs(model: onnx.ModelProto, shape: tuple[int, ...]) -> list[np.ndarray]:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return ReferenceEvaluator(model).run(None, {"x": x})


@settings(max_examples=30, derandomize=True, database=None)
@given(
    rank=st.sampled_from([3, 4, 5]), keep=st.booleans(), negative=st.booleans(), readers=st.integers(1, 2),
    after=st.sampled_from(["", "Neg"]), batch=st.integers(1, 3),
)  # fmt: skip
def test_the_function_and_its_shapes_are_the_same(
    rank: int, keep: bool, negative: bool, readers: int, after: str, batch: int
) -> None:
    shape = (batch, 3, *(4, 5, 2)[: rank - 2])
    axes = [axis - rank if negative else axis for axis in range(2, rank)][::-1]
    model = mean(shape, axes, keep, readers, after)
    changed, rewritten = applied(model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    kinds = [node.op_type for node in rewritten.graph.node]
    assert kinds.count("GlobalAveragePool") == 1
    assert "ReduceMean" not in kinds
    assert kinds.count("Reshape") == (0 if keep else readers)
    for want, got, step in zip(outputs(model, shape), outputs(rewritten, shape), (0.01, 0.02), strict=False):
        assert want.shape == got.shape
        assert np.abs(want - got).max() < 1.01 * step  # another order of summation may round to the next integer
        assert (want == got).mean() > 0.8


def test_the_pooled_values_name_and_the_output_stay() -> None:
    model = mean((2, 3, 4, 4), [2, 3], keep=False)
    rewritten = applied(model)[1]
    assert [v.name for v in rewritten.graph.output] == [v.name for v in model.graph.output]
    pool = next(node for node in rewritten.graph.node if node.op_type == "GlobalAveragePool")
    source = next(node for node in model.graph.node if node.op_type == "ReduceMean")
    assert (pool.name, list(pool.output)) == (source.name, list(source.output))


def test_axes_are_dropped_from_integers(tmp_path: Path) -> None:
    model = applied(mean((2, 3, 4, 4), [2, 3], keep=False))[1]
    reshape = next(node for node in model.graph.node if node.op_type == "Reshape")
    producer = next(node for node in model.graph.node if reshape.input[0] in node.output)
    assert producer.op_type == "QuantizeLinear"
    kernels = run(model, {"x": np.ones((2, 3, 4, 4), np.float32)}, tmp_path)[1]
    assert "QLinearGlobalAveragePool" in kernels
    assert "ReduceMean" not in kernels


@pytest.mark.parametrize("axes", [[1, 2, 3], [3], [1], [0, 2, 3]])
def test_other_axes_stay(axes: list[int]) -> None:
    assert applied(mean((2, 3, 4, 4), axes, keep=True))[0] == 0


def test_a_mean_of_floats_or_read_as_float_stays() -> None:
    b = Builder()
    axes = b.constant([2, 3], np.int64)
    floats = b.op("ReduceMean", b.input("x", ["n", 3, 4, 4]), axes)
    assert applied(b.model(b.pair(floats, 0.1, 0)))[0] == 0
    b = Builder()
    pooled = b.op("ReduceMean", b.pair(b.input("x", ["n", 3, 4, 4]), 0.1, 0), b.constant([2, 3], np.int64))
    assert applied(b.model(b.pair(pooled, 0.1, 0), b.op("Neg", pooled)))[0] == 0
    b = Builder()
    pooled = b.op("ReduceMean", b.pair(b.input("x", ["n", 3, 4, 4]), 0.1, 0), b.constant([2, 3], np.int64))
    assert applied(b.model(pooled))[0] == 0
