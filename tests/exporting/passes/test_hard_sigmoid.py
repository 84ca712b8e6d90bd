"""A hard sigmoid between integers becomes a sum with the same 256 results, in integers in the runtime; others stay."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdq_files import Builder, needs_x86, rewritten_by, run

from qtool.exporting.passes import hard_sigmoid
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.runtimes.ort import optimized_graph

STEP = 1 / 256


def gate(
    scale: float, zero_point: int, out: tuple[float, int] = (STEP, 0), *, alpha: float = 1 / 6, readers: int = 1,
    size: tuple[int, ...] = (4, 8, 8),
) -> onnx.ModelProto:  # fmt: skip
    b = Builder()
    x = b.pair(b.input("x", ["n", *size]), scale, zero_point)
    gated = b.op("HardSigmoid", x, alpha=alpha, beta=0.5)
    return b.model(*[b.pair(gated, *out) for _ in range(readers)])


applied = functools.partial(rewritten_by, hard_sigmoid.apply)


def every_value(scale: float, zero_point: int) -> np.ndarray:
    return ((np.arange(256) - zero_point).astype(np.float32) * np.float32(scale)).astype(np.float32).reshape(1, 4, 8, 8)


@needs_x86
@settings(max_examples=40, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(scale=st.floats(1e-3, 0.2), zero_point=st.integers(0, 255))
def test_all_integers_are_those_of_the_hard_sigmoid(scale: float, zero_point: int, tmp_path: Path) -> None:
    changed, rewritten = applied(gate(scale, zero_point))
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = every_value(scale, zero_point)
    want = (torch.nn.functional.hardsigmoid(torch.from_numpy(x)) / STEP).round().clamp(0, 255).numpy() * STEP
    (got,), _ = run(rewritten, {"x": x}, tmp_path)
    assert np.array_equal(got, want)
    assert np.array_equal(IntegerReference(rewritten).run({"x": x})[0], got)


def test_the_runtime_has_one_integer_kernel_for_it(tmp_path: Path) -> None:
    onnx.save(applied(gate(0.03, 120))[1], tmp_path / "a.onnx")
    kinds = [node.op_type for node in optimized_graph(tmp_path / "a.onnx").graph.node]
    assert kinds == ["QuantizeLinear", "QLinearAdd", "DequantizeLinear"]


@pytest.mark.parametrize(
    "model",
    [gate(0.03, 120, (1 / 250, 0)), gate(0.03, 120, (1 / 256, 3)), gate(0.03, 120, alpha=0.2)],
    ids=["range over 1", "range under 0", "another slope"],
)
def test_others_stay(model: onnx.ModelProto) -> None:
    assert applied(model)[0] == 0


def test_several_quantizers_may_read_it() -> None:
    changed, rewritten = applied(gate(0.03, 120, readers=2))
    assert changed == 1
    assert [node.op_type for node in rewritten.graph.node].count("Add") == 1


@pytest.mark.parametrize("size", [(8, 1, 1), (8,)])
def test_the_half_has_as_many_axes_as_what_it_is_added_to(size: tuple[int, ...]) -> None:
    """ONNX Runtime adds a shorter one to what ends in axes of 1 element by element, many times as slowly."""
    _, rewritten = applied(onnx.shape_inference.infer_shapes(gate(0.03, 120, size=size)))
    (half,) = [tensor for tensor in rewritten.graph.initializer if tensor.name.endswith("/one")]
    assert list(half.dims) == [1] * (len(size) + 1)
