"""A padding that became a convolution's own: bit for bit the same integers, by the runtime and by the reference."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, needs_x86, rewritten_by, run

from qtool.exporting.passes import conv_pads
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.runtimes.ort import optimized_graph


def padded(
    ends: list[int], own: list[int], stride: int = 2, mode: str = "constant", value: float | None = 0.0,
    channels: tuple[int, int] = (0, 0), read_elsewhere: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    b = Builder()
    x = b.pair(b.input("x", ["n", 3, 6, 7]), 0.03, 70)
    amounts = b.constant([0, channels[0], ends[0], ends[1], 0, channels[1], ends[2], ends[3]], np.int64)
    inputs = [x, amounts] + ([b.constant(value, np.float32)] if value is not None else [])
    y = b.op("Pad", *inputs, mode=mode)
    depth = 3 + sum(channels)
    convolutions = [
        b.op("Conv", y, b.weight(4, depth, 3, 3), b.bias(0.03), kernel_shape=[3, 3], pads=own, strides=[stride] * 2)
        for _ in range(2)
    ]
    outputs = [b.pair(value, 0.05, 100) for value in convolutions]
    outputs += [b.pair(y, 0.03, 70)] if read_elsewhere else []
    return b.model(*outputs)


applied = functools.partial(rewritten_by, conv_pads.apply)


@needs_x86
@settings(max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    ends=st.lists(st.integers(0, 3), min_size=4, max_size=4), own=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    stride=st.integers(1, 3), value=st.sampled_from([0.0, None]), elsewhere=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_integers_are_the_same(
    ends: list[int], own: list[int], stride: int, value: float | None, elsewhere: bool, seed: int, tmp_path: Path
) -> None:
    model = padded(ends, own, stride, value=value, read_elsewhere=elsewhere)
    changed, rewritten = applied(model)
    assert changed == 2
    assert sum(node.op_type == "Pad" for node in rewritten.graph.node) == elsewhere
    x = np.random.default_rng(seed).normal(size=(2, 3, 6, 7)).astype(np.float32)
    served = run(rewritten, {"x": x}, tmp_path)[0]
    wanted = ReferenceEvaluator(model).run(None, {"x": x})
    for want, same, got, integer in zip(
        wanted, ReferenceEvaluator(rewritten).run(None, {"x": x}), served, IntegerReference(rewritten).run({"x": x}),
        strict=True,
    ):  # fmt: skip
        assert np.array_equal(want, same)
        assert np.array_equal(got, integer)
        assert np.abs(got - want).max() < 0.051  # the reference adds in float, and may round a tie otherwise


def test_the_runtime_convolves_integers(tmp_path: Path) -> None:
    onnx.save(applied(padded([0, 1, 1, 0], [0] * 4))[1], tmp_path / "a.onnx")
    kinds = [node.op_type for node in optimized_graph(tmp_path / "a.onnx").graph.node if node.op_type != "Transpose"]
    assert sorted(kinds) == ["DequantizeLinear"] * 2 + ["QLinearConv"] * 2 + ["QuantizeLinear"]


@pytest.mark.parametrize(
    "how", [{"mode": "reflect"}, {"value": 1.0}, {"channels": (0, 1)}, {"ends": [0, -1, 1, 1]}], ids=str
)
def test_others_stay(how: dict[str, object]) -> None:
    assert applied(padded(**{"ends": [1] * 4, "own": [0] * 4, **how}))[0] == 0  # type: ignore[arg-type]
