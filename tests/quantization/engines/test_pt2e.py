"""The default engine: observers where the placement puts them, integers that mean what the observers saw."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.errors import QtoolError
from qtool.form import DEQUANTIZE, QUANTIZE, quantize_nodes, quantized
from qtool.graphs.operators import aten
from qtool.quantization.calibration.observers import (
    FakeQuantizer,
    PerChannelFakeQuantizer,
    PerChannelWeightObserver,
    RangeObserver,
)
from qtool.quantization.capturing.capture import capture
from qtool.quantization.engines import pt2e
from qtool.quantization.placement import Placement
from qtool.quantization.ranges import weight_range
from qtool.quantization.rewrites.norms import fold_batch_norm
from qtool.quantization.targets import ORT_CPU


class Net(nn.Module):
    """A residual block, pooling, a branch read twice, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(self.conv(x) + x)
        return self.head(torch.flatten(nn.functional.max_pool2d(y, 2).mean((2, 3)), 1))


X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(train: bool = False, **options: Any) -> tuple[GraphModule, Placement]:
    torch.manual_seed(0)
    graph = capture(Net().train(train), X, train=train)
    if not train:
        fold_batch_norm(graph)
    placement = Placement(graph, ORT_CPU)
    return pt2e.prepare(graph, placement, train=train, **options), placement


def test_observers_change_nothing_and_are_named_after_units() -> None:
    torch.manual_seed(0)
    graph = capture(Net().eval(), X)
    fold_batch_norm(graph)
    expected = graph(X)
    placement = Placement(graph, ORT_CPU)
    made = pt2e.prepare(graph, placement)
    assert torch.equal(made(X), expected)
    observers = pt2e.observers(made, placement)
    assert list(observers) == ["x", "stem", "conv", "add", "mean"]
    assert all(observer.histogram.name == name for name, observer in observers.items())
    assert all(isinstance(observer, RangeObserver) for observer in observers.values())
    weights = [m for m in made.modules() if isinstance(m, PerChannelWeightObserver)]
    assert sorted(len(w.end) for w in weights) == [3, 4, 4]


def test_a_weight_is_read_once_however_many_batches_there_are_and_again_when_it_changes() -> None:
    made, _ = prepared(weight_ranges="mse")
    with patch("qtool.quantization.calibration.observers.weight_range", wraps=weight_range) as read:
        for _ in range(3):
            made(X)
        assert read.call_count == 3  # of three layers
        weight = next(p for p in made.parameters() if p.dim() == 4)
        with torch.no_grad():
            weight.mul_(2)
        made(X)
        assert read.call_count == 4
        assert read.call_args.args[0].data_ptr() == weight.data_ptr()


def test_what_only_moves_shares_one_observer() -> None:
    made, _ = prepared()
    modules = dict(made.named_modules(remove_duplicate=False))
    watched = {n.args[0].target: modules[n.target] for n in made.graph.nodes if n.op == "call_module"}
    assert watched[aten.max_pool2d.default] is watched[aten.relu.default]


def test_conversion_writes_the_observers_scales_once_each() -> None:
    made, placement = prepared()
    made(X)
    ranges = {name: observer.calculate_qparams() for name, observer in pt2e.observers(made, placement).items()}
    graph = pt2e.convert(made)
    found = {node.args[1:3] for node in quantize_nodes(graph)}
    assert found == {(float(scale), int(zero)) for scale, zero in ranges.values()}
    for node in quantize_nodes(graph):
        readers = [user for user in node.users if user.target in DEQUANTIZE]
        assert all(reader.args[1:] == node.args[1:] for reader in readers)


def test_a_converted_weight_is_int8_and_every_unit_reads_integers() -> None:
    made, placement = prepared()
    made(X)
    graph = pt2e.convert(made)
    weighted = [n for n in graph.graph.nodes if n.target in (aten.conv2d.default, aten.linear.default)]
    assert len(weighted) == sum(unit.weight_bits == 8 for unit in placement.plan().units)
    for node in weighted:
        source, weight = node.args[:2]
        assert source.target is quantized.dequantize_per_tensor.default
        assert weight.target is quantized.dequantize_per_channel.default
        assert weight.args[3:] == (0, -127, 127, torch.int8)
        assert graph.get_buffer(weight.args[0].target).dtype == torch.int8
    assert not any(n.target is quantized.quantize_per_channel.default for n in graph.graph.nodes)


def test_one_quantizer_at_the_input_and_none_at_the_output() -> None:
    made, _ = prepared()
    made(X)
    graph = pt2e.convert(made)
    (source,) = (n for n in graph.graph.nodes if n.op == "placeholder")
    assert [user.target for user in source.users] == [quantized.quantize_per_tensor.default]
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    assert all(n.target not in (*QUANTIZE, *DEQUANTIZE) for n in output.all_input_nodes)


def test_the_quantized_graph_is_the_float_graph_with_rounded_values() -> None:
    """Each unit's input and output quantized in numpy, by the formula, weights by theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6()).eval()
    graph = capture(model, X)
    made = pt2e.prepare(graph, Placement(graph, ORT_CPU))
    made(X)
    got = pt2e.convert(made)(X).detach().numpy()

    def rounded(x: np.ndarray, low: float, high: float) -> np.ndarray:
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float32((high - low) / 255)
        zero = np.rint(-low / scale)
        return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale

    x = rounded(X.numpy(), float(X.min()), float(X.max()))
    w = model[0].weight.detach().numpy()
    scale = np.abs(w).max(axis=(1, 2, 3), keepdims=True) / 127
    y = nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(np.rint(w / scale) * scale), model[0].bias).relu()
    real = torch.relu(model[0](X)).detach()
    expected = rounded(y.detach().numpy(), 0.0, float(real.max()))
    step = float(real.max()) / 255
    assert np.abs(got - expected).max() < 1.01 * step
    assert (np.abs(got - expected) < 1e-5).mean() > 0.999


def test_fake_quantizers_train_and_convert_to_the_same_numbers() -> None:
    made, placement = prepared(train=True)
    fakes = pt2e.fake_quantizers(made)
    assert sum(isinstance(f, FakeQuantizer) for f in fakes) == len(pt2e.observers(made, placement)) == 5
    assert sum(isinstance(f, PerChannelFakeQuantizer) for f in fakes) == 3
    assert all(fake.name == name for name, fake in pt2e.observers(made, placement).items())
    made(X).square().sum().backward()
    gradients = {name: value.grad for name, value in made.named_parameters() if value.requires_grad}
    assert gradients
    assert all(g is not None and bool(torch.isfinite(g).all()) and bool(g.any()) for g in gradients.values())


def test_a_model_without_an_integer_operator_is_refused_with_the_reasons() -> None:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x)

    graph = capture(Fourier(), X)
    with pytest.raises(QtoolError, match=r"'ort-cpu' runs in integers; got none: no integer kernel on this target"):
        pt2e.prepare(graph, Placement(graph, ORT_CPU))


def test_conversion_without_a_calibration_pass_is_refused() -> None:
    made, _ = prepared()
    with pytest.raises(QtoolError):
        pt2e.convert(made)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("train", [False, True])
def test_a_value_that_is_not_finite_is_told_with_its_layer(bad: float, train: bool) -> None:
    made, placement = prepared(train)
    pt2e.observers(made, placement)
    x = X.clone()
    x[0, 0, 0, 0] = bad

    def tell() -> None:
        made(x)
        pt2e.convert(made)  # a fake-quantizer tells it when its range is asked for: a step waits for nothing

    with pytest.raises(QtoolError, match=r"layer 'x': expected finite"):
        tell()
