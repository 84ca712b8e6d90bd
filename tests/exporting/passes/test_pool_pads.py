"""A pool's input that is padded with zeros is padded with zeros, whatever the runtime makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, rewritten_by, run

from qtool.exporting.passes import pool_pads


def padded(value: float | None, pool: str = "MaxPool") -> onnx.ModelProto:
    b = Builder()
    given = [] if value is None else [b.constant(value, np.float32)]
    y = b.op("Pad", b.input("x", ["n", 2, 6, 6]), b.constant([0, 0, 1, 0, 0, 0, 1, 2], np.int64), *given)
    return b.model(b.op(pool, y, kernel_shape=[3, 3], strides=[2, 2], pads=[0] * 4))


X = -np.abs(np.random.default_rng(0).normal(size=(2, 2, 6, 6))).astype(np.float32)


@pytest.mark.parametrize("value", [None, 0.0, -0.01])
def test_a_maximum_counts_what_is_padded_with(value: float | None, tmp_path: Path) -> None:
    changed, model = rewritten_by(pool_pads.apply, padded(value))
    assert changed == 1
    (expected,) = ReferenceEvaluator(padded(value)).run(None, {"x": X})
    np.testing.assert_array_equal(run(model, {"x": X}, tmp_path)[0][0], expected)


@pytest.mark.parametrize(("value", "pool"), [(-np.inf, "MaxPool"), (0.0, "AveragePool")])
def test_what_the_pool_may_take_is_left_to_it(value: float, pool: str) -> None:
    assert rewritten_by(pool_pads.apply, padded(value, pool))[0] == 0
