"""Depthwise convolutions filled up to whole vectors: the same integers by the runtime and by both references."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, needs_x86, rewritten_by, run
from torch import nn

from qtool.exporting.gates.parity import unit_parity
from qtool.exporting.passes import even_channels
from qtool.exporting.passes.even_channels import VECTOR, own_channels
from qtool.exporting.reference.integer_reference import IntegerReference
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


def layers(b: Builder, y: str, inputs: int, outputs: int, kernel: int = 1, *, depthwise: bool = False) -> str:
    """A convolution, depthwise or not, with ReLU between pairs of one scale."""
    weight = b.weight(outputs, 1 if depthwise else inputs, kernel, kernel)
    groups = {"group": outputs} if depthwise else {}
    made = b.op("Conv", y, weight, b.bias(0.05), pads=[kernel // 2] * 4, **groups)
    return b.pair(b.op("Relu", made), 0.05, 0)


def ghost(channels: int, *, add: bool = True, rest: int = 16384) -> onnx.ModelProto:
    """GhostNet's module: half of the channels made by a convolution, half of these by a depthwise one, side by side."""
    b = Builder()
    x = b.input("x", ["n", 8, 9, 9])
    y = b.pair(x, 0.05, 110)
    half = layers(b, y, 8, channels)
    whole = b.pair(b.op("Concat", half, layers(b, half, channels, channels, 3, depthwise=True), axis=1), 0.05, 0)
    if add:
        whole = b.pair(b.op("Add", whole, layers(b, y, 8, 2 * channels)), 0.06, 0)
    read = layers(b, layers(b, whole, 2 * channels, 2 * channels, 3, depthwise=True), 2 * channels, 6)
    return b.model(read, layers(b, y, 8, rest))


applied = functools.partial(rewritten_by, even_channels.apply)


def weights_of(model: onnx.ModelProto) -> list[list[int]]:
    """The shapes of the weights that are read."""
    constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    stored = {node.output[0]: node.input[0] for node in model.graph.node}
    found = [node.input[1] for node in model.graph.node if node.op_type == "Conv"]
    return [constants[stored.get(name, name)] for name in found]


def assert_computes_the_same(model: onnx.ModelProto, rewritten: onnx.ModelProto, batch: int, folder: Path) -> None:
    onnx.checker.check_model(rewritten, full_check=True)
    x = {"x": np.random.default_rng(batch).normal(size=(batch, 8, 9, 9)).astype(np.float32)}
    by_reference = [ReferenceEvaluator(m).run(None, x) for m in (model, rewritten)]
    by_integers = [IntegerReference(m).run(x) for m in (model, rewritten)]
    by_runtime = [run(m, x, folder)[0] for m in (model, rewritten)]
    for before, after in (by_reference, by_integers, by_runtime):
        for want, got in zip(before, after, strict=True):
            np.testing.assert_array_equal(got, want)


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
    assert changed
    depthwise = [n for n in rewritten.graph.node for a in n.attribute if a.name == "group" and a.i > 1]
    assert [a.i % VECTOR for n in depthwise for a in n.attribute if a.name == "group"] == [0]
    assert_computes_the_same(model, rewritten, batch, tmp_path)


@needs_x86
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("channels", "filled"), [(12, 16), (20, 32), (40, 48)])
def test_zeros_stand_between_the_channels_of_a_concatenation(
    channels: int, filled: int, add: bool, tmp_path: Path
) -> None:
    model = ghost(channels, add=add)
    _, rewritten = applied(model)
    shapes = weights_of(rewritten)
    assert shapes[:2] == [[filled, 8, 1, 1], [filled, 1, 3, 3]]
    assert [2 * filled, 1, 3, 3] in shapes
    assert shapes.count([2 * filled, 8, 1, 1]) == add  # what is added to it has its zeros at the same places
    assert_computes_the_same(model, rewritten, 2, tmp_path)
    tensors = {value.name: value.type.tensor_type.shape.dim for value in rewritten.graph.value_info}
    told = own_channels(rewritten)
    assert {tensors[name][1].dim_value for name in told} == {2 * filled}
    assert all(places == [*range(channels), *range(filled, filled + channels)] for places in told.values())


@st.composite
def nets(draw: st.DrawFn) -> onnx.ModelProto:
    """Convolutions of odd widths, depthwise ones, sums and concatenations of what there is, in any order."""
    b = Builder(draw(st.integers(0, 9)))
    y = b.pair(b.input("x", ["n", 8, 9, 9]), 0.05, 110)
    widths = draw(st.lists(st.integers(2, 40), min_size=2, max_size=3))
    made = [(y, 8), *[(layers(b, y, 8, width), width) for width in widths]]
    for _ in range(draw(st.integers(2, 6))):
        value, width = draw(st.sampled_from(made[1:]))
        kind = draw(st.sampled_from(["conv", "depthwise", "concat", "add", "gate"]))
        alike = [other for other, size in made if size == width]
        if kind == "conv":
            width, value = (
                (new := draw(st.integers(2, 40))),
                layers(b, value, width, new, draw(st.sampled_from([1, 3]))),
            )
        elif kind == "depthwise":
            value = layers(b, value, width, width, 3, depthwise=True)
        elif kind == "concat":
            other, more = draw(st.sampled_from(made))
            value, width = b.pair(b.op("Concat", value, other, axis=1), 0.05, 0), width + more
        elif kind == "add":
            value = b.pair(b.op("Add", value, draw(st.sampled_from(alike))), 0.05, 100)
        else:
            value = b.pair(b.op("Mul", value, b.pair(b.op("GlobalAveragePool", value), 0.05, 3)), 0.05, 0)
        made.append((value, width))
    ends = [
        layers(b, value, width, 5) for value, width in draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
    ]
    return b.model(*dict.fromkeys(ends), *draw(st.sampled_from([[], [made[-1][0]]])))


@needs_x86
@settings(SETTINGS, max_examples=40)
@given(model=nets())
def test_any_net_computes_the_same(model: onnx.ModelProto, tmp_path: Path) -> None:
    """With weights as many as it takes, so that most are filled up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(even_channels, "FEW", 1 << 30)
        patch.setattr(even_channels, "LEAST_GAIN", draw_all := -1e9)
        patch.setattr(even_channels, "LEAST_OF_ALL", draw_all)
        changed, rewritten = applied(model)
    event(f"{changed} convolutions")
    assert_computes_the_same(model, rewritten, 2, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"channels": 48}, {"end": "output"}, {"end": "flatten"}, {"factor": "channels"}, {"rest": 64}],
    ids=["whole vectors", "an output", "flattened", "a constant each", "a file that would grow"],
)
def test_others_stay(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even_channels, "FEW", 0)
    model = block(**{"gate": False, **changes})
    changed, rewritten = applied(model)
    assert changed == 0
    assert len(rewritten.graph.node) == len(model.graph.node)
    assert {t.name: t for t in rewritten.graph.initializer} == {t.name: t for t in model.graph.initializer}


def test_a_constant_for_all_channels_does_not_matter() -> None:
    assert applied(block(factor="one"))[0]


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


class Ghost(nn.Module):
    """Twelve channels, and twelve that a depthwise convolution makes of them, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.ReLU())
        self.read = nn.Conv2d(24, 16, 1)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.first(x)
        return self.head(torch.relu(self.read(torch.cat([half, self.second(half)], 1))))


def test_units_are_compared_without_what_stands_between_their_channels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    form = quantize(Ghost().eval(), QuantizeConfig(), example=x[:2], calibration=[x])
    path, wrong = tmp_path / "net.onnx", tmp_path / "wrong.onnx"
    save(quantized_to_onnx(form, 21), path)
    model = onnx.load(path)
    assert list(own_channels(model).values()) == [[*range(12), *range(16, 28)]]
    assert unit_parity(form, path, [x]).passed
    reader = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [16, 32, 1, 1])
    values = onnx.numpy_helper.to_array(reader).copy()
    assert not values[:, 12:16].any()
    assert not values[:, 28:].any()
    values[:, 27] = -values[:, 27]  # the last one of the second half
    reader.CopyFrom(onnx.numpy_helper.from_array(values, reader.name))
    onnx.save(model, wrong)
    assert unit_parity(form, wrong, [x]).passed is False
