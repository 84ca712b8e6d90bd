"""A gate repeated along the rows gives the same integers: in ONNX's reference, the integer reference, ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, run

from qtool.exporting.passes import wide_gates
from qtool.exporting.reference.integer_reference import IntegerReference


def gated(
    channels: int, size: tuple[int, int], *, first: bool = False, end: str = "", stored: bool = False
) -> onnx.ModelProto:
    """x times a sigmoid of its means, the map or the gate standing first."""
    b = Builder()
    x = b.pair(b.input("x", ["n", channels, *size]), 0.03, 100)
    means = b.pair(b.op("GlobalAveragePool", x), 0.02, 90)
    gate = (
        b.constant(np.full((1, channels, 1, 1), 77), np.uint8)
        if stored
        else b.quantize(b.op("Sigmoid", means), 1 / 256, 0)
    )
    gate = b.dequantize(gate, 1 / 256, 0)
    product = b.op("Mul", *((gate, x) if first else (x, gate)))
    return b.model(product if end == "float" else b.pair(product, 0.02, 110))


def applied(model: onnx.ModelProto) -> tuple[int, onnx.ModelProto]:
    rewritten = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    return wide_gates.apply(rewritten), ir.serde.serialize_model(rewritten)


@settings(max_examples=20, derandomize=True, database=None)
@given(
    channels=st.integers(1, 9), size=st.tuples(st.integers(1, 6), st.integers(2, 6)), first=st.booleans(),
    batch=st.integers(1, 3),
)  # fmt: skip
def test_every_integer_is_the_same(channels: int, size: tuple[int, int], first: bool, batch: int) -> None:
    model = gated(channels, size, first=first)
    changed, rewritten = applied(model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = {"x": np.random.default_rng(0).normal(size=(batch, channels, *size)).astype(np.float32)}
    np.testing.assert_array_equal(*(ReferenceEvaluator(m).run(None, x)[0] for m in (model, rewritten)))
    np.testing.assert_array_equal(*(IntegerReference(m).run(x)[0] for m in (model, rewritten)))


def test_onnx_runtime_multiplies_the_same_integers(tmp_path: Path) -> None:
    model = gated(16, (12, 12))
    _, rewritten = applied(model)
    x = {"x": np.random.default_rng(1).normal(size=(3, 16, 12, 12)).astype(np.float32)}
    (want, _), (got, kernels) = (run(m, x, tmp_path) for m in (model, rewritten))
    np.testing.assert_array_equal(got[0], want[0])
    assert kernels.count("QLinearMul") == 1
    assert "Mul" not in kernels


@pytest.mark.parametrize(
    "changes",
    [{"channels": wide_gates.MOST_CHANNELS + 1}, {"size": (5, 1)}, {"end": "float"}, {"stored": True}],
    ids=["many channels", "columns", "a product in float", "a stored gate"],
)
def test_others_stay(changes: dict[str, object]) -> None:
    model = gated(**({"channels": 4, "size": (3, 3)} | changes))  # type: ignore[arg-type]
    changed, rewritten = applied(model)
    assert changed == 0
    assert [n.op_type for n in rewritten.graph.node] == [n.op_type for n in model.graph.node]
