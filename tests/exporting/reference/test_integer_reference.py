"""Whole networks: the integer reference against ONNX Runtime, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qdq_files import Array, Builder, needs_x86, run

from qtool.errors import QtoolError
from qtool.exporting.reference.integer_arithmetic import Quantized
from qtool.exporting.reference.integer_reference import IntegerReference


class Network(Builder):
    """Draws a convolutional network in QDQ form; remembers the meaning of its latest tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scale, self.zero_point, self.channels = 0.02, int(self.random.integers(100, 156)), 3
        self.x = self.pair(self.input("x", ["batch", 3, 16, 16]), self.scale, self.zero_point)

    def settle(self, y: str, scale: float, rectified: bool) -> None:
        self.scale, self.zero_point = float(np.float32(scale)), 0 if rectified else int(self.random.integers(90, 166))
        self.x = self.pair(y, self.scale, self.zero_point)

    def conv(self, outputs: int, kernel: int, stride: int, groups: int, activation: str) -> None:
        weight = self.weight(outputs, self.channels // groups, kernel, kernel)
        bias = self.bias(self.scale)
        y = self.op("Conv", self.x, weight, bias, strides=[stride] * 2, pads=[kernel // 2] * 4, group=groups)
        spread = self.scale * float(self.scales.mean()) * 4500 * np.sqrt(self.channels // groups * kernel**2)
        if activation == "Clip":
            y = self.op("Clip", y, self.constant(0.0, np.float32), self.constant(6.0, np.float32))
            self.settle(y, min(spread * 3, 6.0) / 255, True)
        elif activation == "Relu":
            self.settle(self.op("Relu", y), spread * 3 / 255, True)
        else:
            self.settle(y, spread * 5 / 255, False)
        self.channels = outputs

    def residual(self, groups: int) -> None:
        kept, scale = self.x, self.scale
        self.conv(self.channels, 3, 1, groups, "Relu")
        self.conv(self.channels, 1, 1, 1, "None")
        rectified = bool(self.random.integers(2))
        y = self.op("Add", *([kept, self.x] if rectified else [self.x, kept]))
        self.settle(self.op("Relu", y) if rectified else y, max(scale, self.scale) * 1.3, rectified)

    def head(self) -> onnx.ModelProto:
        pooled = self.pair(self.op("GlobalAveragePool", self.x), self.scale / 2, self.zero_point)
        rows = self.op("Reshape", pooled, self.constant(np.array([0, -1])))
        self.scale = self.scale / 2
        return self.model(self.op("Gemm", rows, self.weight(10, self.channels), self.bias(self.scale), transB=1))


@st.composite
def networks(draw: st.DrawFn) -> onnx.ModelProto:
    net = Network(draw(st.integers(0, 2**16)))
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()) and net.channels > 3:
            net.residual(draw(st.sampled_from([1, 2, net.channels])))
        else:
            outputs = draw(st.sampled_from([4, 8, 12, 32]))
            groups = draw(st.sampled_from([1, net.channels])) if outputs % net.channels == 0 else 1
            activation = draw(st.sampled_from(["Relu", "Clip", "None"]))
            net.conv(outputs, draw(st.sampled_from([1, 3, 5])), draw(st.sampled_from([1, 2])), groups, activation)
    return net.head()


@needs_x86
@given(model=networks(), batch=st.integers(1, 5))
@settings(max_examples=40, derandomize=True)
def test_drawn_networks_equal_the_runtime(
    tmp_path_factory: pytest.TempPathFactory, model: onnx.ModelProto, batch: int
) -> None:
    x = np.random.default_rng(batch).normal(size=(batch, 3, 16, 16)).astype(np.float32)
    expected, operators = run(model, {"x": x}, tmp_path_factory.mktemp("drawn"))
    reference = IntegerReference(model)
    assert reference.uncovered == []
    assert operators.count("QLinearConv") == reference.covered["Conv"]
    assert operators.count("QLinearAdd") == reference.covered["Add"]
    assert np.array_equal(reference.run({"x": x})[0], expected[0])


def wrong(model: onnx.ModelProto, name: str, by: float) -> onnx.ModelProto:
    """``model`` with one scale a little off."""
    mutant = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in mutant.graph.initializer:
        if tensor.name == name:
            array = onnx.numpy_helper.to_array(tensor) * np.float32(by)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return mutant


@needs_x86
def test_a_scale_that_is_off_is_seen(tmp_path: Path) -> None:
    net = Network(3)
    net.conv(8, 3, 1, 1, "Relu")
    net.residual(1)
    model = net.head()
    x = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    expected = run(model, {"x": x}, tmp_path)[0][0]
    assert np.array_equal(IntegerReference(model).run({"x": x})[0], expected)
    scales = {n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    for name in sorted(scales):
        assert not np.array_equal(IntegerReference(wrong(model, name, 1.05)).run({"x": x})[0], expected)


def small_model() -> tuple[onnx.ModelProto, Array]:
    net = Network(5)
    net.conv(8, 3, 2, 1, "Relu")
    return net.head(), np.random.default_rng(1).normal(size=(3, 3, 16, 16)).astype(np.float32)


def test_a_file_reads_like_the_model_and_runs_repeat(tmp_path: Path) -> None:
    model, x = small_model()
    onnx.save(model, tmp_path / "model.onnx")
    first, second = IntegerReference(model), IntegerReference(tmp_path / "model.onnx")
    assert np.array_equal(first.run({"x": x})[0], second.run({"x": x})[0])
    assert np.array_equal(first.run({"x": x})[0], first.run({"x": x})[0])
    assert np.array_equal(first.run({"x": x[1:2]})[0], first.run({"x": x})[0][1:2])


def test_trace_keeps_integers_between_units() -> None:
    model, x = small_model()
    reference = IntegerReference(model)
    values = reference.trace({"x": x})
    convolution = next(unit for unit in reference.units if unit.node.op == "Conv")
    tensor = values[convolution.output]
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.uint8
    pairs = [v for name, v in values.items() if isinstance(v, Quantized) and name not in reference.constants]
    assert pairs


@needs_x86
@pytest.mark.parametrize("layer", ["none", "convolution"])
@pytest.mark.parametrize("zero_point", [0, 120])
def test_a_pool_also_says_where_its_largest_were(tmp_path: Path, layer: str, zero_point: int) -> None:
    """With few steps, so that many are equal, and padding, which is below every number and equal to the least."""
    net = Builder()
    x = net.pair(net.input("x", ["batch", 3, 9, 8]), 0.5, zero_point)
    y = x if layer == "none" else net.op("Conv", x, net.weight(4, 3, 1, 1), net.bias(0.5))
    pooled = net.op("MaxPool", y, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 1, 1, 0])
    net.nodes[-1].output.append("places")
    moved = net.pair(pooled, 0.5, zero_point)
    model = net.model(net.op("Flatten", moved), net.op("Flatten", net.op("Cast", "places", to=onnx.TensorProto.FLOAT)))
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 3, 9, 8)).astype(np.float32)}
    expected = run(model, feeds, tmp_path)[0]
    for found, wanted in zip(IntegerReference(model).run(feeds), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_wrong_inputs_are_named() -> None:
    model, x = small_model()
    with pytest.raises(QtoolError, match=r"inputs \['x'\]; got \['image'\]"):
        IntegerReference(model).run({"image": x})


def test_scales_that_are_computed_are_refused() -> None:
    builder = Builder()
    x, scale = builder.input("x", [2, 3]), builder.input("scale", [])
    model = builder.model(builder.op("QuantizeLinear", x, scale, builder.constant(3, np.uint8)))
    with pytest.raises(QtoolError, match="constant, unblocked scales"):
        IntegerReference(model)


def test_what_is_rounded_to_bfloat16_is_so_in_the_reference_too(tmp_path: Path) -> None:
    b = Builder()
    x = b.pair(b.input("x", ["n", 6]), 0.05, 120)
    halves = b.op("Cast", b.op("Exp", x), to=onnx.TensorProto.BFLOAT16)
    path = tmp_path / "m.onnx"
    model = b.model(b.op("Cast", halves, to=onnx.TensorProto.FLOAT))
    onnx.save(model, path)
    value = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    (found,) = IntegerReference(path).run({"x": value})
    np.testing.assert_allclose(found, run(model, {"x": value}, tmp_path)[0][0], rtol=1e-6)
