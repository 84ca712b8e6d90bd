"""An activation is removed exactly when the quantizer behind it clips as it does: brute force over every integer."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, rewritten_by

from qtool.exporting.passes import activations

Bounds = tuple[float | None, float | None]


def built(bounds: Bounds | None, scale: float, zero_point: int, dtype: type) -> onnx.ModelProto:
    """x → Relu (without bounds) or Clip → quantizer."""
    b = Builder()
    x = b.input("x", ["n"])
    ends = ["" if end is None else b.constant(end, np.float32) for end in bounds or ()]
    clamped = b.op("Relu", x) if bounds is None else b.op("Clip", x, *ends)
    return b.model(b.quantize(clamped, scale, zero_point, dtype))


applied = functools.partial(rewritten_by, activations.apply)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def every_integer(scale: float, zero_point: int, dtype: type) -> np.ndarray:
    """A real number in the middle of each step, and far beyond both ends."""
    limits = np.iinfo(dtype)
    steps = np.arange(limits.min - 3, limits.max + 4) - zero_point
    middle = steps.astype(np.float32) * np.float32(scale)
    return np.concatenate([middle, np.float32([-1e6, 1e6, 0.0])])


def outputs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


limits = st.one_of(st.none(), st.sampled_from([-6.0, -1.0, -0.5, 0.0, 0.5, 1.0, 6.0]), st.floats(-8, 8, width=32))


@settings(max_examples=150, derandomize=True, database=None)
@given(
    bounds=st.one_of(st.none(), st.tuples(limits, limits)), span=st.floats(0.125, 12, width=32),
    share=st.floats(0, 1), dtype=st.sampled_from([np.uint8, np.int8]),
)  # fmt: skip
@example(bounds=None, span=6.0, share=0.0, dtype=np.uint8)
@example(bounds=(0.0, 6.0), span=6.0, share=0.0, dtype=np.uint8)
@example(bounds=(-1.0, 1.0), span=2.0, share=0.5, dtype=np.uint8)
@example(bounds=(0.0, None), span=6.0, share=0.0, dtype=np.int8)
def test_removed_exactly_where_nothing_changes(bounds: Bounds | None, span: float, share: float, dtype: type) -> None:
    """``span`` is the quantizer's range, of which ``share`` lies below zero."""
    if bounds is not None and None not in bounds and bounds[0] > bounds[1]:
        bounds = bounds[::-1]
    info = np.iinfo(dtype)
    scale, zero_point = float(np.float32(span / 255)), int(info.min + round(255 * share))
    model = built(bounds, scale, zero_point, dtype)
    removed, rewritten = applied(model)
    x = every_integer(scale, zero_point, dtype)
    plain = (np.clip(np.rint(x / np.float32(scale)) + zero_point, info.min, info.max)).astype(dtype)
    unchanged = bool((outputs(model, x) == plain).all())
    assert removed == unchanged
    assert kinds(rewritten) == (["QuantizeLinear"] if removed else kinds(model))
    np.testing.assert_array_equal(outputs(rewritten, x), outputs(model, x))


@pytest.mark.parametrize("zero_point", [1, 128])
def test_a_relu_stays_where_negative_numbers_have_integers(zero_point: int) -> None:
    assert applied(built(None, 0.02, zero_point, np.uint8))[0] == 0


def test_an_activation_with_another_reader_stays() -> None:
    b = Builder()
    relu = b.op("Relu", b.input("x", ["n"]))
    quantized = b.quantize(relu, 0.1, 0)
    assert applied(b.model(quantized, b.op("Neg", relu)))[0] == 0


def test_an_activation_that_is_an_output_stays() -> None:
    b = Builder()
    relu = b.op("Relu", b.input("x", ["n"]))
    assert applied(b.model(b.quantize(relu, 0.1, 0), relu))[0] == 0


def test_bounds_or_scales_that_are_not_constant_are_left_alone() -> None:
    b = Builder()
    x, low = b.input("x", ["n"]), b.input("low", [])
    assert applied(b.model(b.quantize(b.op("Clip", x, low), 0.1, 0)))[0] == 0
    b = Builder()
    x, scale = b.input("x", ["n"]), b.input("scale", [])
    assert applied(b.model(b.op("QuantizeLinear", b.op("Relu", x), scale, b.constant(0, np.uint8))))[0] == 0
    b = Builder()
    x = b.op("Relu", b.input("x", ["n", 2]))
    per_channel = b.op("QuantizeLinear", x, b.constant([0.1, 0.2], np.float32), b.constant([0, 0], np.uint8), axis=1)
    assert applied(b.model(per_channel))[0] == 0


def test_two_in_a_row_are_both_removed_or_the_first_is_kept() -> None:
    b = Builder()
    twice = b.op("Clip", b.op("Relu", b.input("x", ["n"])), b.constant(0, np.float32), b.constant(6, np.float32))
    model = b.model(b.quantize(twice, 6 / 255, 0))
    _, rewritten = applied(model)
    x = every_integer(6 / 255, 0, np.uint8)
    np.testing.assert_array_equal(outputs(rewritten, x), outputs(model, x))
