"""The last step: biases by the formula in numpy, dead channels kept, quantizers labelled and not repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qtool.form import QuantizedModel, quantize_nodes, quantized
from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.quantization.integers import MAX_BIAS
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.conv(x)).amax((2, 3)))


X = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def made(model: nn.Module, x: Tensor = X, bits: int = 8) -> QuantizedModel:
    config = QuantizeConfig(ranges="minmax", algorithms=None, weight_bits=bits, edge_bits=bits)
    return quantize(model.eval(), config, example=x[:2], calibration=[x])


def weighted(model: QuantizedModel) -> list[dict[str, Any]]:
    """What each convolution and linear layer reads, as numpy arrays."""
    found = []
    for node in model.graph.graph.nodes:
        if node.target in (aten.conv2d.default, aten.linear.default):
            source, weight, bias = node.args[:3]
            values = [parameter(model.graph, argument).numpy() for argument in (*weight.args[:2], *bias.args[:3])]
            names = ("weight", "scale", "bias", "bias_scale", "bias_zero_point")
            found.append({"source_scale": source.args[1], **dict(zip(names, values, strict=True)), "node": node})
    return found


@pytest.fixture(scope="module")
def net() -> tuple[Net, QuantizedModel]:
    torch.manual_seed(0)
    model = Net()
    return model, made(model)


def test_a_bias_is_its_value_over_the_product_of_scales(net: tuple[Net, QuantizedModel]) -> None:
    model, form = net
    for layer, unit in zip((model.conv, model.linear), weighted(form), strict=True):
        combined = unit["scale"].astype(np.float64) * unit["source_scale"]
        np.testing.assert_array_equal(unit["bias"], np.rint(layer.bias.detach().numpy() / combined))
        np.testing.assert_array_equal(unit["bias_scale"], combined.astype(np.float32))
        assert unit["bias"].dtype == np.int32
        assert not unit["bias_zero_point"].any()


def test_weights_are_the_symmetric_formula_per_output_channel(net: tuple[Net, QuantizedModel]) -> None:
    model, form = net
    for layer, unit in zip((model.conv, model.linear), weighted(form), strict=True):
        w = layer.weight.detach().numpy()
        rows = w.reshape(len(w), -1)
        scale = np.maximum(np.abs(rows).max(1) / np.float32(127), np.finfo(np.float32).eps)
        np.testing.assert_array_equal(unit["scale"], scale.astype(np.float32))
        steps = np.rint(rows / scale[:, None]).reshape(w.shape)
        assert np.abs(unit["weight"].astype(int) - steps).max() <= 1  # a tie may go either way
        assert (unit["weight"] == steps).mean() > 0.99
        assert np.abs(unit["weight"].astype(int)).max(axis=tuple(range(1, w.ndim))).tolist() == [127] * len(w)


def test_activations_are_the_affine_formula_of_their_extremes(net: tuple[Net, QuantizedModel]) -> None:
    model, form = net
    values = [X, torch.relu(model.conv(X)).detach()]
    for node, value in zip(quantize_nodes(form.graph)[:2], values, strict=True):
        low, high = min(float(value.min()), 0.0), max(float(value.max()), 0.0)
        scale = np.float32((np.float32(high) - np.float32(low)) / np.float32(255))
        _, got_scale, got_zero, *limits, dtype = node.args
        assert got_scale == pytest.approx(float(scale), rel=1e-6)
        assert got_zero == -round(low / float(scale))
        assert (limits, dtype) == ([0, 255], torch.uint8)


def test_the_float_graph_keeps_its_bias(net: tuple[Net, QuantizedModel]) -> None:
    model, form = net
    assert form.float_graph is not None
    with torch.no_grad():
        assert torch.equal(form.float_graph(X), model(X))


def test_nothing_unread_is_kept(net: tuple[Net, QuantizedModel]) -> None:
    graph = net[1].graph
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    assert {name for name, _ in [*graph.named_parameters(), *graph.named_buffers()]} == read
    assert not any(value.dtype == torch.float32 and value.dim() > 1 for value in graph.parameters())


def test_every_quantizer_is_labelled_with_its_unit(net: tuple[Net, QuantizedModel]) -> None:
    labels = [node.meta["custom"]["unit"] for node in quantize_nodes(net[1].graph)]
    assert labels == ["x", "conv", "max_pool2d", "squeeze"]


def shifted(channels: dict[int, tuple[float, float]]) -> Net:
    """A net whose convolution has the given channels' weights multiplied and bias replaced."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for channel, (factor, bias) in channels.items():
            model.conv.weight[channel] *= factor
            model.conv.bias[channel] = bias
    return model


@pytest.mark.parametrize("bias", [3000.0, -40.0])
@pytest.mark.parametrize("factor", [0.0, 1e-9])
def test_a_nearly_dead_channel_keeps_its_bias_and_its_neighbours_their_integers(factor: float, bias: float) -> None:
    model = shifted({2: (factor, bias)})
    form, plain = made(model), made(shifted({}))
    (note,) = form.plan.notes
    assert note == "conv: weight scale raised in nearly dead channels 2 so that the int32 bias fits"
    unit, other = weighted(form)[0], weighted(plain)[0]
    assert np.abs(unit["bias"].astype(np.float64)).max() <= MAX_BIAS
    real = unit["bias"] * unit["bias_scale"].astype(np.float64)
    np.testing.assert_allclose(real, model.conv.bias.detach().numpy(), rtol=1e-5, atol=1e-4)
    for index in (0, 1, 3):
        np.testing.assert_array_equal(unit["weight"][index], other["weight"][index])
        assert unit["scale"][index] == other["scale"][index]
        assert unit["bias"][index] == other["bias"][index]
    assert form.float_graph is not None
    with torch.no_grad():
        expected, got = form.float_graph(X), form(X)
    assert float((expected - got).abs().max() / expected.abs().max()) < 0.03


@pytest.mark.parametrize("sign", [1, -1])
def test_a_raised_scale_keeps_its_sign_so_that_four_bits_hold_the_integers(sign: int) -> None:
    """The farthest weight, −8 steps of either sign, is still −8 of steps that are a twentieth larger."""
    model = shifted({2: (1e-9 * sign, 0.0)})
    before = weighted(made(model, bits=4))[0]
    limit = MAX_BIAS * before["source_scale"] * abs(float(before["scale"][2]))
    with torch.no_grad():
        model.conv.bias[2] = 1.05 * limit
    form = made(model, bits=4)
    assert "raised in nearly dead channels 2 " in form.plan.notes[0]
    unit = weighted(form)[0]
    assert unit["scale"][2] / before["scale"][2] == pytest.approx(1.05, rel=0.01)
    assert (unit["weight"].min(), unit["weight"][2].min()) == (-8, -8)
    assert unit["weight"].max() <= 7


@pytest.mark.parametrize("unit", [1e-6, 1e-9])
def test_values_in_units_of_which_they_are_few_keep_their_steps(unit: float) -> None:
    torch.manual_seed(0)
    model = Net()
    for bias in (model.conv.bias, model.linear.bias):
        assert bias is not None
        nn.init.zeros_(bias)
    wanted = model(X * unit).detach()
    error = made(model, X * unit)(X * unit) - wanted
    assert 10 * torch.log10(wanted.square().sum() / error.square().sum()) > 30


def test_many_dead_channels_are_told_in_short() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(2000.0)
    (note,) = made(model).plan.notes
    assert "channels 0, 1, 2, 3, 4, 5, 6, 7 … so that" in note


class Shared(nn.Module):
    """One convolution read twice, its inputs of very different size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.conv(torch.relu(self.conv(x * 0.001)))


def test_a_bias_read_by_several_operators_is_rounded_for_each() -> None:
    torch.manual_seed(0)
    model = Shared()
    form = made(model)
    units = weighted(form)
    assert len(units) == 3
    assert len({unit["source_scale"] for unit in units}) == 3
    for unit in units:
        combined = unit["scale"].astype(np.float64) * unit["source_scale"]
        np.testing.assert_array_equal(unit["bias"], np.rint(model.conv.bias.detach().numpy() / combined))
        np.testing.assert_array_equal(unit["weight"], units[0]["weight"])
    assert len({unit["node"].args[1].args[0].target for unit in units}) == 1  # stored once


def test_raising_a_scale_for_one_reader_leaves_the_others() -> None:
    torch.manual_seed(0)
    model = Shared()
    with torch.no_grad():
        model.conv.weight[1] *= 1e-6
        model.conv.bias[1] = 0.02
    form = made(model)
    units = weighted(form)
    raised = [unit["scale"][1] for unit in units]
    assert len(form.plan.notes) >= 1
    assert len(set(raised)) > 1
    for unit in units:
        real = unit["bias"] * unit["bias_scale"].astype(np.float64)
        np.testing.assert_allclose(real[1], 0.02, rtol=1e-3)
        np.testing.assert_array_equal(unit["weight"][0], units[0]["weight"][0])


def test_no_quantizer_repeats_the_one_before_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3))
    form = made(model)
    for node in quantize_nodes(form.graph):
        source = node.args[0]
        repeats = source.target is quantized.dequantize_per_tensor.default and source.args[1:] == node.args[1:]
        assert not repeats
    pool, flat = (n for n in quantize_nodes(form.graph) if n.meta["custom"]["unit"] in ("2", "4"))
    assert pool.args[1:] == flat.args[1:]  # what only moves bytes keeps their meaning
