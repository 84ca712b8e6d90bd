"""Which groups become one integer operator: the planner's answer against ONNX Runtime's optimised graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from qdq_files import Builder, needs_x86, run

from qtool.exporting.reference.integer_arithmetic import Affine
from qtool.exporting.reference.integer_graph import Graph, Planner, overlap
from qtool.exporting.reference.integer_reference import IntegerReference

pytestmark = needs_x86
SCALE, ZERO = 0.03, 120
Net = Callable[[Builder, str], str | tuple[str, ...]]


def conv(b: Builder, x: str) -> str:
    return b.op("Conv", x, b.weight(8, 8, 3, 3), b.bias(SCALE), pads=[1] * 4)


def flat(b: Builder, x: str) -> str:
    return b.op("Reshape", x, b.constant(np.array([-1, 8 * 9 * 10])))


def float_bias(b: Builder, size: int) -> str:
    return b.constant(b.random.normal(size=size), np.float32)


def two_readers(b: Builder, x: str) -> tuple[str, ...]:
    y = conv(b, x)
    return b.pair(y, 0.5, 9), b.pair(b.op("Relu", y), 0.2, 0)


def branches(b: Builder, x: str) -> tuple[str, ...]:
    y = b.pair(conv(b, x), 0.5, 9)
    return b.pair(y, 0.2, 100), b.pair(b.op("Add", y, x), 0.5, 90)


def clipped(high: float, scale: float) -> Net:
    def net(b: Builder, x: str) -> str:
        limits = b.constant(0.0, np.float32), b.constant(high, np.float32)
        return b.pair(b.op("Clip", conv(b, x), *limits), scale, 0)

    return net


def squeeze_excite(b: Builder, x: str) -> str:
    mean = b.pair(b.op("GlobalAveragePool", x), 0.01, 100)
    gate = b.pair(b.op("Conv", mean, b.weight(8, 8, 1, 1), b.bias(0.01)), 0.02, 110)
    return b.pair(b.op("Mul", x, b.pair(b.op("Sigmoid", gate), 1 / 256, 0)), 0.03, 110)


def upsampled(b: Builder, x: str) -> str:
    scales = b.constant([1, 1, 2, 1.5], np.float32)
    y = b.op("Resize", x, "", scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return b.pair(b.op("Concat", b.pair(y, SCALE, ZERO), b.pair(y, 0.05, 90), axis=1), 0.04, 100)


COVERED: dict[str, tuple[Net, str]] = {
    "conv": (lambda b, x: b.pair(conv(b, x), 0.5, 100), "QLinearConv"),
    "conv, relu": (lambda b, x: b.pair(b.op("Relu", conv(b, x)), 0.5, 0), "QLinearConv"),
    "conv, clip as wide as the range": (clipped(6.0, 6 / 255), "QLinearConv"),
    "conv, clip wider than the range": (clipped(6.0, 5 / 255), "QLinearConv"),
    "conv, float bias": (
        lambda b, x: b.pair(b.op("Conv", x, b.weight(8, 8, 3, 3), float_bias(b, 8)), 0.5, 99),
        "QLinearConv",
    ),
    "conv, relu, max pool": (
        lambda b, x: b.pair(b.op("MaxPool", b.op("Relu", conv(b, x)), kernel_shape=[2, 2], strides=[2, 2]), 0.5, 0),
        "QLinearConv",
    ),
    "two pairs in a row": (lambda b, x: b.pair(b.pair(conv(b, x), 0.5, 9), 0.2, 100), "QLinearConv"),
    "two branches, one requantised": (branches, "QLinearAdd"),
    "add, relu": (lambda b, x: b.pair(b.op("Relu", b.op("Add", x, b.pair(x, 0.1, 7))), 0.06, 0), "QLinearAdd"),
    "linear on a reshaped input": (
        lambda b, x: b.op("Gemm", flat(b, x), b.weight(10, 720), b.bias(SCALE), transB=1),
        "QGemm",
    ),
    "linear, relu, no quantiser": (
        lambda b, x: b.op("Relu", b.op("Gemm", flat(b, x), b.weight(10, 720), b.bias(SCALE), transB=1)),
        "QGemm",
    ),
    "matmul and vector": (
        lambda b, x: b.pair(b.op("Add", b.op("MatMul", x, b.weight(10, 12, axis=1)), float_bias(b, 12)), 0.3, 90),
        "QGemm",
    ),
    "matmul without a quantiser": (
        lambda b, x: b.op("MatMul", x, b.weight(10, 12, axis=1)),
        "MatMulIntegerToFloat",
    ),
    "squeeze and excite": (squeeze_excite, "QLinearMul"),
    "nearest neighbours, concat": (upsampled, "QLinearConcat"),
    "hard swish in float": (lambda b, x: b.pair(b.op("HardSwish", x), 0.03, 20), "HardSigmoid"),
    "hard sigmoid in float": (lambda b, x: b.pair(b.op("HardSigmoid", x, alpha=0.2), 1 / 255, 0), "HardSigmoid"),
    "silu in float": (lambda b, x: b.pair(b.op("Mul", b.op("Sigmoid", x), x), 0.03, 20), "Sigmoid"),
    "transpose to other steps": (lambda b, x: b.pair(b.op("Transpose", x, perm=[0, 2, 3, 1]), 0.05, 9), "Transpose"),
    "slice": (
        lambda b, x: b.pair(b.op("Slice", x, *(b.constant(np.array([n])) for n in (1, 5, 1))), SCALE, ZERO),
        "Slice",
    ),
}
LEFT_IN_FLOAT: dict[str, Net] = {
    "relu that the range does not cover": lambda b, x: b.pair(b.op("Relu", conv(b, x)), 0.5, 3),
    "clip narrower than the range": clipped(6.0, 7 / 255),
    "two readers": two_readers,
    "conv without a quantiser": lambda b, x: conv(b, x),
    "linear on a flattened input": lambda b, x: b.op(
        "Gemm", b.op("Flatten", x), b.weight(10, 720), b.bias(SCALE), transB=1
    ),
    "linear with float bias, no quantiser": lambda b, x: b.op(
        "Gemm", flat(b, x), b.weight(10, 720), float_bias(b, 10), transB=1
    ),
    "matmul and vector, no quantiser": lambda b, x: b.op(
        "Add", b.op("MatMul", x, b.weight(10, 12, axis=1)), float_bias(b, 12)
    ),
    "linear with alpha and bias": lambda b, x: b.pair(
        b.op("Gemm", flat(b, x), b.weight(10, 720), b.bias(SCALE), transB=1, alpha=0.5), 0.5, 100
    ),
    "transposed convolution": lambda b, x: b.pair(b.op("ConvTranspose", x, b.weight(8, 8, 3, 3, axis=1)), 0.5, 99),
    "mean": lambda b, x: b.pair(b.op("ReduceMean", x, b.constant(np.array([2, 3]))), 0.05, 99),
}


def built(net: Net, dtype: type = np.uint8) -> tuple[Builder, tuple[str, ...]]:
    builder = Builder()
    x = builder.pair(builder.input("x", [2, 8, 9, 10]), SCALE, ZERO if dtype is np.uint8 else 3, dtype)
    outputs = net(builder, x)
    return builder, outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("name", COVERED)
def test_covered_graphs_are_the_runtimes_bit_for_bit(name: str, tmp_path: Path) -> None:
    net, operator = COVERED[name]
    builder, outputs = built(net)
    model = builder.model(*outputs)
    feeds = {"x": builder.random.normal(size=(2, 8, 9, 10)).astype(np.float32)}
    expected, operators = run(model, feeds, tmp_path)
    reference = IntegerReference(model)
    assert operator in operators
    assert reference.uncovered == []
    assert ("QGemm" in operators) == ("Gemm" in reference.covered)
    for got, want in zip(reference.run(feeds), expected, strict=True):
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)


@pytest.mark.parametrize("name", LEFT_IN_FLOAT)
def test_what_the_runtime_leaves_in_float_is_named(name: str, tmp_path: Path) -> None:
    builder, outputs = built(LEFT_IN_FLOAT[name])
    model = builder.model(*outputs)
    feeds = {"x": builder.random.normal(size=(2, 8, 9, 10)).astype(np.float32)}
    expected, operators = run(model, feeds, tmp_path)
    reference = IntegerReference(model)
    assert not {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"} & set(operators)
    assert len(reference.uncovered) == 1
    assert "float32" in reference.uncovered[0]["done"]
    for got, want in zip(reference.run(feeds), expected, strict=True):
        assert np.allclose(got, want, rtol=1e-4, atol=0.51)


def signed_chain(b: Builder, x: str) -> str:
    y = b.pair(b.op("Relu", conv(b, x)), 0.5, -128, np.int8)
    z = b.pair(b.op("Conv", y, b.weight(8, 8, 1, 1), b.bias(0.5)), 4.0, -9, np.int8)
    return b.pair(b.op("GlobalAveragePool", z), 1.0, 4, np.int8)


def signed_fork(b: Builder, x: str) -> str:
    y = b.pair(conv(b, x), 0.5, -9, np.int8)
    z = b.pair(b.op("Conv", y, b.weight(8, 8, 1, 1), b.bias(0.5)), 4.0, -9, np.int8)
    return b.pair(b.op("Add", y, z), 4.0, -9, np.int8)


@pytest.mark.parametrize(("net", "left"), [(signed_chain, []), (signed_fork, ["Conv", "Conv"])])
def test_signed_activations_become_unsigned_where_they_are_read_once(net: Net, left: list[str], tmp_path: Path) -> None:
    builder, outputs = built(net, np.int8)
    model = builder.model(*outputs)
    feeds = {"x": builder.random.normal(size=(2, 8, 9, 10)).astype(np.float32)}
    expected, operators = run(model, feeds, tmp_path)
    reference = IntegerReference(model)
    assert [entry["op"] for entry in reference.uncovered] == left
    assert ("QLinearConv" in operators) != bool(left)
    assert left or np.array_equal(reference.run(feeds)[0], expected[0])


def test_overlap_of_two_ranges() -> None:
    scale, zero_point = overlap(Affine.of(0.1, 0), Affine.of(0.1, 100))
    assert scale == np.float32(np.float32(15.5) / np.float32(255))
    assert zero_point == 0
    scale, zero_point = overlap(Affine.of(0.1, 128), Affine.of(0.05, 128))
    assert (scale, zero_point) == (np.float32(0.05), 128)


def test_every_node_belongs_to_one_unit() -> None:
    builder, outputs = built(squeeze_excite)
    graph = Graph(builder.model(*outputs))
    units = Planner(graph).plan()
    fused = [unit.node.op for unit in units if unit.fused]
    assert fused == ["GlobalAveragePool", "Conv", "Sigmoid", "Mul"]
    assert len({unit.output for unit in units}) == len(units) == len(graph.nodes) - len(fused)
