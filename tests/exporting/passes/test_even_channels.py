"""Depthwise convolutions filled up to whole vectors: the same integers by the runtime and by both references."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, needs_x86, rewritten_by, run
from torch import nn

from qtool.exporting.integer_reference import IntegerReference
from qtool.exporting.parity import unit_parity
from qtool.exporting.passes import even_channels
from qtool.exporting.passes.even_channels import VECTOR
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

SETTINGS = settings(max_examples=10, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def block(
    channels: int = 40, *, kernel: int = 3, stride: int = 1, gate: bool = True, float_maker: bool = False,
    end: str = "", factor: str = "", rest: int = 4096,
) -> onnx.ModelProto:  # fmt: skip
    """An inverted residual: a convolution that makes channels, a depthwise one, a gate, a convolution that reads them.

    ``rest`` channels of another convolution let the file grow.
    """
    b = Builder()
    x = b.input("x", ["n", 8, 9, 9])
    y = b.pair(x, 0.03, 110)
    if float_maker:
        weight = b.constant(b.random.normal(size=(channels, 8, 1, 1)), np.float32)
        made = b.op("Conv", y, weight, b.constant(b.random.normal(size=channels), np.float32))
    else:
        made = b.op("Conv", y, b.weight(channels, 8, 1, 1), b.bias(0.03))
    y = b.pair(b.op("Relu", made), 0.05, 0)
    if factor:
        shape = {"channels": (1, channels, 1, 1), "one": (1,)}[factor]
        y = b.pair(b.op("Mul", y, b.dequantize(b.constant(np.full(shape, 7), np.uint8), 0.1, 3)), 0.05, 4)
    depthwise = b.weight(channels, 1, kernel, kernel)
    padding = [kernel // 2] * 4
    y = b.op("Conv", y, depthwise, b.bias(0.05), group=channels, pads=padding, strides=[stride] * 2)
    y = b.pair(y, 0.06, 120)
    if gate:
        means = b.pair(b.op("GlobalAveragePool", y), 0.04, 100)
        fewer = b.pair(b.op("Relu", b.op("Conv", means, b.weight(4, channels, 1, 1), b.bias(0.04))), 0.03, 0)
        gates = b.op("Sigmoid", b.pair(b.op("Conv", fewer, b.weight(channels, 4, 1, 1), b.bias(0.03)), 0.05, 128))
        y = b.pair(b.op("Mul", y, b.pair(gates, 1 / 256, 0)), 0.05, 110)
    if end == "flatten":
        y = b.op("Flatten", y)
    read = y if end else b.pair(b.op("Conv", y, b.weight(6, channels, 1, 1), b.bias(0.05)), 0.1, 125)
    other = b.pair(b.op("Conv", b.pair(x, 0.03, 110), b.weight(rest, 8, 1, 1), b.bias(0.03)), 0.1, 125)
    return b.model(read, other)


applied = functools.partial(rewritten_by, even_channels.apply)


@needs_x86
@SETTINGS
@given(
    channels=st.sampled_from([40, 56, 72, 120]), kernel=st.sampled_from([3, 5]), stride=st.integers(1, 2),
    gate=st.booleans(), float_maker=st.booleans(), batch=st.integers(1, 3),
)  # fmt: skip
def test_the_integers_are_the_same(
    channels: int, kernel: int, stride: int, gate: bool, float_maker: bool, batch: int, tmp_path: Path
) -> None:
    model = block(channels, kernel=kernel, stride=stride, gate=gate, float_maker=float_maker)
    changed, rewritten = applied(model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    depthwise = [n for n in rewritten.graph.node for a in n.attribute if a.name == "group" and a.i > 1]
    assert [a.i % VECTOR for n in depthwise for a in n.attribute if a.name == "group"] == [0]
    x = {"x": np.random.default_rng(batch).normal(size=(batch, 8, 9, 9)).astype(np.float32)}
    by_reference = [ReferenceEvaluator(m).run(None, x) for m in (model, rewritten)]
    by_integers = [IntegerReference(m).run(x) for m in (model, rewritten)]
    by_runtime = [run(m, x, tmp_path)[0] for m in (model, rewritten)]
    for before, after in (by_reference, by_integers, by_runtime):
        for want, got in zip(before, after, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "changes",
    [{"channels": 48}, {"channels": 24}, {"end": "output"}, {"end": "flatten"}, {"factor": "channels"}, {"rest": 64}],
    ids=["whole vectors", "over a fifth", "an output", "flattened", "a constant each", "a file that would grow"],
)
def test_others_stay(changes: dict[str, Any]) -> None:
    model = block(**changes)
    changed, rewritten = applied(model)
    assert changed == 0
    assert len(rewritten.graph.node) == len(model.graph.node)
    assert {t.name: t for t in rewritten.graph.initializer} == {t.name: t for t in model.graph.initializer}


def test_a_constant_for_all_channels_does_not_matter() -> None:
    assert applied(block(factor="one"))[0] == 1


def test_units_are_compared_without_what_was_filled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even_channels, "MOST_GROWTH", 1.0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 40, 1), nn.Hardswish(), nn.Conv2d(40, 40, 3, groups=40), nn.ReLU(), nn.Conv2d(40, 5, 1)]
    x = torch.randn(8, 3, 8, 8)
    form = quantize(nn.Sequential(*layers).eval(), QuantizeConfig(), example=x[:2], calibration=[x])
    save(quantized_to_onnx(form, 21), tmp_path / "net.onnx")
    shapes = [list(tensor.dims) for tensor in onnx.load(tmp_path / "net.onnx").graph.initializer]
    assert [48, 1, 3, 3] in shapes
    assert unit_parity(form, tmp_path / "net.onnx", [x]).passed
    wrong = onnx.load(tmp_path / "net.onnx")
    weight = next(tensor for tensor in wrong.graph.initializer if list(tensor.dims) == [48, 1, 3, 3])
    values = onnx.numpy_helper.to_array(weight).copy()
    assert not values[40:].any()
    values[39] = -values[39]  # the last channel that is compared
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    assert unit_parity(form, tmp_path / "wrong.onnx", [x]).passed is False
