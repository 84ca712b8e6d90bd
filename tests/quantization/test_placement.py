"""Placement: what becomes one integer unit, what stays in float and why, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import conv_nets
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import UsageError
from qtool.form import Unit
from qtool.graphs.edits import remove_identities
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import fold_batch_norm
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU, get_target
from qtool.recipe import QuantizeConfig

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Modules to be put together by a function."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.fc, self.again = nn.BatchNorm2d(4), nn.Linear(4, 3), nn.Linear(3, 3)
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.row = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def placed(function: Callable[[Any, Tensor], Any], overrides: dict[str, str] | None = None) -> Placement:
    graph = capture(Net(function).eval(), X)
    remove_identities(graph)
    fold_batch_norm(graph)
    return Placement(graph, ORT_CPU, overrides)


def kinds(placement: Placement) -> list[tuple[str, bool]]:
    return [(unit.kind, unit.integer) for unit in placement.plan().units]


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (torch.relu, True),
    "relu_": (lambda y: F.relu(y, inplace=True), True),
    "relu6": (F.relu6, True),
    "relu6_": (lambda y: F.relu6(y, inplace=True), True),
    "hardtanh from 0": (lambda y: F.hardtanh(y, 0.0, 3.0), True),
    "clamp from 0": (lambda y: y.clamp(0, 2), True),
    "clamp_min 0": (lambda y: y.clamp(min=0), True),
    "clip from 0": (lambda y: torch.clip(y, 0, 1), True),
    "hardtanh": (F.hardtanh, True),
    "clamp": (lambda y: y.clamp(-0.5, 0.5), True),
    "clamp above 0": (lambda y: y.clamp(0.1, 2), False),
    "clamp below 0": (lambda y: y.clamp(max=-0.1), False),
    "clamp_max": (lambda y: y.clamp(max=0.5), True),
    "hardswish": (F.hardswish, False),
    "silu": (F.silu, False),
    "gelu": (F.gelu, False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_absorbed_when_the_quantizer_can_do_it(name: str) -> None:
    function, absorbed = ACTIVATIONS[name]
    placement = placed(lambda m, x: m.b(function(m.a(x))))
    if absorbed:
        assert kinds(placement) == [("conv", True), ("conv", True)]
        assert len(placement.placed[0].nodes) == 2
    else:
        assert kinds(placement) == [("conv", True), ("activation", False), ("conv", True)]
        assert placement.plan().float_units[0].reason == "it runs in float between integers"
        assert placement.is_integer(placement.placed[1].output)  # its result is quantized all the same


def test_a_value_with_another_reader_ends_the_unit() -> None:
    def read_twice(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return torch.relu(y) + y

    assert kinds(placed(read_twice)) == [("conv", True), ("activation", False), ("add", True)]


def test_an_activation_that_reads_the_unit_second_is_not_absorbed() -> None:
    def other_way(m: Any, x: Tensor) -> Tensor:
        return torch.relu(x + m.a(x))

    assert kinds(placed(other_way)) == [("conv", True), ("add", True)]


JOINS: dict[str, tuple[Callable[[Any, Tensor], Any], list[tuple[str, bool]], str]] = {
    "residual": (lambda m, x: m.b(torch.relu(m.a(x))) + x, [("conv", True), ("conv", True), ("add", True)], ""),
    "itself": (lambda m, x: m.a(x) * 2 + x, [("conv", True), ("mul", False), ("add", False)], "Python number"),
    "alpha": (lambda m, x: torch.add(m.a(x), m.b(x), alpha=2), [("conv", True)] * 2 + [("add", False)], "alpha"),
    "parameter": (lambda m, x: m.a(x) * m.row, [("conv", True), ("mul", False)], "constant"),
    "gate": (lambda m, x: m.a(x) * m.b(x).sigmoid(), [("conv", True)] * 2 + [("sigmoid", True), ("mul", True)], ""),
    "concat": (lambda m, x: torch.cat([m.a(x), x, m.b(x)], 1), [("conv", True)] * 2 + [("concat", True)], ""),
    "float first": (lambda m, x: m.up(x)[:, :, 1:, 1:] + m.a(x),
                    [("conv_transpose2d", False), ("conv", True), ("add", False)], "float"),
    "float concat": (lambda m, x: torch.cat([m.up(x)[:, :, 1:, 1:], m.a(x)], 1),
                     [("conv_transpose2d", False), ("conv", True), ("concat", False)], "float"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINS)
def test_joins_are_integer_where_all_they_read_is(name: str) -> None:
    function, expected, reason = JOINS[name]
    placement = placed(function)
    assert sorted(kinds(placement)) == sorted(expected)
    reasons = [unit.reason for unit in placement.plan().float_units]
    assert any(reason in found for found in reasons) if reason else not reasons


def test_blocks_that_become_channels_are_moved_as_integers() -> None:
    assert kinds(placed(lambda m, x: m.b(F.pixel_unshuffle(m.a(x), 2)[:, 4:8]))) == [("conv", True)] * 2


POOLS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, bool]]] = {
    "adaptive": (lambda y: F.adaptive_avg_pool2d(y, 1), ("global_avg_pool", True)),
    "mean": (lambda y: y.mean((2, 3)), ("global_avg_pool", True)),
    "mean from behind": (lambda y: y.mean((-1, -2), keepdim=True), ("global_avg_pool", True)),
    "mean of rows": (lambda y: y.mean(3), ("mean", False)),
    "mean of channels": (lambda y: y.mean((1, 2, 3)), ("mean", False)),
    "adaptive, even": (lambda y: F.adaptive_avg_pool2d(y, 2), ("avg_pool", True)),
    "adaptive, uneven": (lambda y: F.adaptive_avg_pool2d(y, 5), ("adaptive_avg_pool2d", False)),
    "average": (lambda y: F.avg_pool2d(y, 2), ("avg_pool", True)),
    "max": (lambda y: F.max_pool2d(y, 3, 2, 1), ("max_pool", True)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    function, expected = POOLS[name]
    assert kinds(placed(lambda m, x: function(m.a(x)))) == [("conv", True), expected]
    (unit,) = (
        placed(lambda m, x: function(torch.exp(x)) if name != "max" else F.max_pool2d(torch.exp(x), 2)).plan().units[1:]
    )
    assert not unit.integer
    assert unit.reason


def test_the_last_linear_layer_gives_float_and_others_integers() -> None:
    def two(m: Any, x: Tensor) -> Any:
        y = m.a(x).mean((2, 3))
        return F.linear(m.fc(y), m.fc.weight[:, :3].detach().clone() * 1), m.fc(y)

    last = placed(lambda m, x: m.fc(m.a(x).mean((2, 3)))).placed[-1]
    assert not last.quantized_output
    reshaped = placed(lambda m, x: m.fc(m.a(x).mean((2, 3))).unsqueeze(1)).placed
    assert [p.quantized_output for p in reshaped if p.unit.kind == "linear"] == [False]
    computed = placed(two)
    assert any("its weight is computed" in unit.reason for unit in computed.plan().float_units)
    conv = placed(lambda m, x: m.a(x)).placed[-1]
    assert conv.quantized_output


READERS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], bool]] = {
    "softmax": (lambda m, floats, y: y.softmax(1), False),
    "softmax, reshaped": (lambda m, floats, y: y.unflatten(1, (1, 3)).softmax(2), False),
    "gelu, then a layer": (lambda m, floats, y: m.again(F.gelu(y)), False),
    "a sum with a float": (lambda m, floats, y: y + floats, False),
    "a layer": (lambda m, floats, y: m.again(y), True),
    "a sum with itself, then a layer": (lambda m, floats, y: m.again(y + y), True),
    "a sum with what comes later, then a layer": (lambda m, floats, y: m.again(y + m.again(floats)), True),
    "a sum with another layer's result, and a float": (lambda m, floats, y: y + m.again(floats) + floats.exp(), False),
    "a sum of three layers' results": (lambda m, floats, y: m.again(floats) + (y + m.again(floats + 1)), False),
    "a sum with what a layer reads": (lambda m, floats, y: y + m.again(y), True),
    "a number more, then a layer": (lambda m, floats, y: m.again(y + 1), False),
    "a sum with a float that comes later": (lambda m, floats, y: m.again(y + 0.5 * floats), False),
    "a product with what its own table makes": (lambda m, floats, y: m.again(y * (y + y).sigmoid()), True),
    "softmax and a layer": (lambda m, floats, y: (y.softmax(1), m.again(y)), True),
    "softmax behind ReLU, which clips the integers": (lambda m, floats, y: y.relu().softmax(1), True),
    "the end behind ReLU": (lambda m, floats, y: y.relu(), False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_linear_layer_gives_float_where_nothing_reads_integers(name: str) -> None:
    function, quantized = READERS[name]
    placement = placed(lambda m, x: function(m, x.softmax(1).mean((2, 3))[:, :3], m.fc(m.a(x).mean((2, 3)))))
    assert next(p.quantized_output for p in placement.placed if p.unit.kind == "linear") is quantized


def test_a_gate_is_a_table_of_256_only_where_integers_read_it() -> None:
    gate = placed(lambda m, x: (y := m.a(x)) * m.b(y).sigmoid() + y)
    assert next(p.unit.integer for p in gate.placed if p.unit.kind == "sigmoid")
    probability = placed(lambda m, x: m.fc(m.a(x).mean((2, 3))).sigmoid())
    assert kinds(probability)[-2:] == [("linear", True), ("sigmoid", False)]
    assert not probability.placed[-2].quantized_output
    mask = placed(lambda m, x: m.a(x).sigmoid()).plan().units[-1]
    assert not mask.integer
    assert "coarse" in mask.reason


@pytest.mark.parametrize("target", ["ort-cpu", "openvino", "tensorrt"])
def test_a_layer_whose_results_are_angles_stays_in_float(target: str) -> None:
    def features(m: Any, x: Tensor) -> Tensor:
        angles = 2 * torch.pi * m.fc(x.flatten(2).mean(2)).unsqueeze(1)
        return m.again(torch.cat([angles.sin(), angles.cos()], dim=1))

    def sines(m: Any, x: Tensor) -> Tensor:
        return m.again((2 * m.fc(x.flatten(2).mean(2))).sin())

    for function, expected in ((features, [False, True]), (sines, [True, True])):
        placement = Placement(capture(Net(function).eval(), X), get_target(target))
        assert [unit.integer for unit in placement.plan().units if unit.kind == "linear"] == expected


def test_fourier_features_are_as_exact_as_what_reads_them() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("waves", 8 * torch.randn(2, 16))
            self.read = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            angles = 2 * torch.pi * (x @ self.waves)
            return self.read(torch.cat([angles.sin(), angles.cos()], dim=-1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Places().eval(), torch.rand(64, 2) * 2 - 1
    quantized = quantize(model, QuantizeConfig(effort="fast"), example=x, calibration=[x])
    with torch.no_grad():
        exact, found = model(x), quantized(x)
    assert (found - exact).square().mean() < 1e-3 * exact.square().mean()


LOGARITHMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "decibels of mel energies": (lambda m, y: 10 * y.transpose(1, 2).clamp(min=1e-10).log10(), False),
    "a root more, squared": (lambda m, y: (1e-6 + y.abs().pow(2) / 2).sqrt().log(), False),
    "a sum of squares": (lambda m, y: (y[:, :1] ** 2 + y[:, 1:2] ** 2).clamp(min=1e-6).log(), False),
    "a maximum": (lambda m, y: torch.maximum(y.relu(), torch.tensor(1e-6)).log2(), False),
    "one more": (lambda m, y: y.relu().log1p(), False),
    "another layer": (lambda m, y: (m.again(y).exp() + 1e-6).log(), True),
    "a mean": (lambda m, y: (y.square().mean(1) + 1e-6).log(), True),
    "a product with another value": (lambda m, y: (y * y.softmax(2) + 1e-6).log(), True),
    "the logarithm of a softmax": (lambda m, y: y.log_softmax(2), True),
}


@pytest.mark.parametrize("name", LOGARITHMS)
@pytest.mark.parametrize("target", ["ort-cpu", "openvino", "tensorrt"])
def test_a_layer_whose_logarithm_is_taken_stays_in_float(name: str, target: str) -> None:
    function, integer = LOGARITHMS[name]
    graph = capture(Net(lambda m, x: function(m, m.fc(m.a(x).flatten(2).transpose(1, 2)))).eval(), X)
    unit = next(unit for unit in Placement(graph, get_target(target)).plan().units if unit.name == "fc")
    assert unit.integer is integer
    assert integer or "logarithm" in unit.reason


@pytest.mark.parametrize("target", ["ort-cpu", "openvino", "tensorrt"])
def test_convolutions_and_products_before_a_logarithm_stay_in_float(target: str) -> None:
    def spectrum(m: Any, x: Tensor) -> Tensor:
        y = m.b(x)
        return ((y.relu() @ y) + 1e-6).log() + (m.a(y) * m.a(y) + 1e-6).log()

    units = Placement(capture(Net(spectrum).eval(), X), get_target(target)).plan().units
    assert {unit.name: unit.integer for unit in units if unit.name in "ab"} == {"b": True, "a": False}
    assert not next(unit for unit in units if unit.kind == "matmul").integer


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_a_stored_filter_bank_keeps_its_numbers_before_a_logarithm(target: str) -> None:
    class Bank(nn.Module):
        def __init__(self, decibels: bool) -> None:
            super().__init__()
            self.register_buffer("bank", torch.rand(64, 80))
            self.decibels = decibels

        def forward(self, power: Tensor) -> Tensor:
            energies = self.bank @ power
            return (energies + 1e-6).log() if self.decibels else energies.tanh()  # type: ignore[no-any-return]

    for decibels in (True, False):
        graph = capture(Bank(decibels).eval(), torch.rand(2, 80, 5))
        unit = Placement(graph, get_target(target)).plan().units[0]
        assert (unit.kind, unit.integer) == ("matmul" if decibels else "stored_product", False)
        assert ("its logarithm is taken" if decibels else "what they gain is size") in unit.reason


def test_log_mel_energies_are_as_exact_as_what_reads_them() -> None:
    class Mel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.rand(33, 12))
            self.read = nn.Linear(12, 4)

        def forward(self, power: Tensor) -> Tensor:
            return self.read((power @ self.bank + 1e-6).log())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Mel().eval(), torch.rand(64, 33) * 10 ** torch.linspace(-4, 2.5, 64)[:, None]
    quantized = quantize(model, QuantizeConfig(effort="fast"), example=x, calibration=[x])
    with torch.no_grad():
        exact, found = model(x), quantized(x)
    assert (found - exact).square().mean() < 1e-3 * exact.square().mean()


PEAKS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "equal": (lambda m, heat: heat * (F.max_pool2d(heat, 3, 1, 1) == heat).float(), False),
    "not less, moved": (lambda m, heat: heat[:, 1:] * (heat >= F.max_pool2d(heat, 3, 1, 1))[:, 1:].float(), False),
    "less, clipped": (lambda m, heat: (y := heat.clamp(0.1, 0.9)) * (y < F.max_pool2d(y, 3, 1, 1)).float(), False),
    "with a number": (lambda m, heat: heat * (F.max_pool2d(heat, 3, 1, 1) >= 0.5).float(), True),
    "with another's": (lambda m, heat: heat * (heat == F.max_pool2d(m.b(heat), 3, 1, 1)).float(), True),
}


@pytest.mark.parametrize("target", ["ort-cpu", "openvino", "tensorrt"])
@pytest.mark.parametrize("name", PEAKS)
def test_a_heat_map_that_is_compared_with_its_maxima_is_not_rounded(name: str, target: str) -> None:
    function, rounded = PEAKS[name]
    graph = capture(Net(lambda m, x: function(m, torch.sigmoid(m.a(x)))).eval(), X)
    placement = Placement(graph, get_target(target))
    layer = next(unit.unit for unit in placement.placed if unit.unit.name == "a")
    assert layer.integer is (rounded or target == "openvino")
    assert layer.integer or "maxima" in layer.reason
    assert rounded or not any(unit.quantized_output for unit in placement.placed)


@pytest.mark.parametrize("name", ["ort-cpu", "openvino"])
def test_an_activation_that_ends_a_network_is_not_rounded(name: str) -> None:
    graph = capture(Net(lambda m, x: (m.a(x).tanh(), m.b(m.a(x)).relu().mean(1, keepdim=True))).eval(), X)
    last = next(unit for unit in Placement(graph, get_target(name)).placed if unit.anchor.target is aten.tanh.default)
    between = capture(Net(lambda m, x: m.b(m.a(x).tanh())).eval(), X)
    assert not last.quantized_output
    assert name == "openvino" or Placement(between, get_target(name)).placed[1].quantized_output


def test_an_upsampling_in_float_leaves_what_joins_it_to_integers() -> None:
    def decoder(m: Any, x: Tensor) -> Tensor:
        low = F.interpolate(m.b(F.max_pool2d(y := m.a(x), 2)), scale_factor=2, mode="bilinear")
        return m.a(F.interpolate(torch.cat([low, y], 1)[:, 2:6] + low, scale_factor=2, mode="bicubic"))

    units = placed(decoder).plan().units
    assert [unit.kind for unit in units if not unit.integer] == ["upsample"] * 2
    assert {"concat", "add"} <= {unit.kind for unit in units if unit.integer}
    end = placed(lambda m, x: F.interpolate(m.a(x), size=(16, 16), mode="bilinear")).placed[-1]
    assert (end.unit.kind, end.quantized_output) == ("upsample", False)


def test_reshapes_cost_nothing_and_are_not_in_the_plan() -> None:
    def reshaped(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x).permute(0, 1, 3, 2).flatten(1).view(-1, 4, 8, 8)).transpose(1, 2)

    placement = placed(reshaped)
    assert kinds(placement) == [("conv", True), ("conv", True)]
    assert all(p.pattern.shares for p in placement.placed if p.pattern and p.unit.kind == "move")
    assert kinds(placed(lambda m, x: m.a(x.permute(0, 1, 3, 2)))) == [("conv", True)]


def test_names_are_module_paths_and_unique() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(self.conv(x)) + x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x).mean((2, 3))

    graph = capture(Outer().eval(), X)
    names = [unit.name for unit in Placement(graph, ORT_CPU).plan().units]
    assert names == [
        "blocks.0.conv", "blocks.0.conv_2", "blocks.0.add", "blocks.1.conv", "blocks.1.conv_2", "blocks.1.add", "mean",
    ]  # fmt: skip


def test_a_convolution_keeps_its_name_beside_a_padding_of_its_module() -> None:
    class Reflect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x)

    units = Placement(capture(Reflect(), X), ORT_CPU).plan().units
    assert [(unit.name, unit.integer) for unit in units] == [("c.pad", True), ("c", True)]


def test_fused_modules_are_listed() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).train(), X, train=True)
    (unit,) = Placement(graph, ORT_CPU).plan().units
    assert unit == Unit("0", "conv", ("0", "1", "2"), weight_bits=8)


def test_overrides_leave_modules_in_float_and_must_match() -> None:
    def two(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.relu(m.a(x))) + x

    placement = placed(two, {"a": "float"})
    assert kinds(placement)[0] == ("conv", False)
    assert placement.plan().float_units[0].reason == "left in float by an override"
    assert [u.name for u in placed(two, {"?": "float"}).plan().integer_units] == []
    assert kinds(placed(two, {"a": "int8", "*": "float"}))[0] == ("conv", True)
    with pytest.raises(
        UsageError, match=r"patterns that match a unit; got zz; use module paths such as .*, \* for any"
    ):
        placed(two, {"zz": "float"})
    with pytest.raises(UsageError, match=r"which none before them does; got a; put the narrower pattern first"):
        placed(two, {"*": "float", "a": "int8"})


def test_an_override_may_name_a_unit_that_one_of_its_module_leaves_in_float_as_well() -> None:
    """As one for each of the units that hurt most does, where a module is called twice."""

    def twice(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.relu(m.a(torch.relu(m.a(x))))) + x

    units = {u.name: u.integer for u in placed(twice, {"a": "float", "a_2": "float"}).plan().units}
    assert (units["a"], units["a_2"], units["b"]) == (False, False, True)
    with pytest.raises(UsageError, match=r"which none before them does; got a_2"):
        placed(twice, {"a": "float", "a_2": "int8"})


def test_an_override_may_name_a_unit_that_is_no_module() -> None:
    def two_sums(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x) + x) + x

    units = {u.name: u.integer for u in placed(two_sums, {"add_2": "float"}).plan().units}
    assert units == {"a": True, "add": True, "b": True, "add_2": False}


def test_an_override_may_leave_in_float_what_has_no_kernel_anyway() -> None:
    """Such as a module that has one on another target, or once did."""
    units = placed(lambda m, x: m.b(m.a(x).softmax(1)), {"softmax": "float"}).plan().units
    assert [(u.name, u.integer) for u in units] == [("a", True), ("softmax", False), ("b", True)]


def test_an_override_gives_a_layer_of_few_bits_all_eight() -> None:
    def three(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.relu(m.b(torch.relu(m.a(x) + x)) + x))

    graph = capture(Net(three).eval(), X)
    few = ORT_CPU.with_weights(4, 8)
    bits = {
        asked: [u.weight_bits for u in Placement(graph, few, dict(asked)).plan().units if u.weight_bits]
        for asked in ((), (("b", "int8"),))
    }
    assert bits == {(): [8, 4, 8], (("b", "int8"),): [8, 8, 8]}
    whole = Placement(graph, ORT_CPU.with_weights(7, 8), {"b": "int8"}).plan()
    assert [u.weight_bits for u in whole.units if u.weight_bits] == [7, 7, 7]


def test_notes_of_the_capture_come_first() -> None:
    assert placed(lambda m, x: m.a(x)).plan(("late",)).notes[-1] == "late"
    assert "module 'fc' is no part of the captured graph" in placed(lambda m, x: m.a(x)).plan(("late",)).notes


def test_integers_and_booleans_are_not_quantized() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            shifted = (ids + 1) * mask
            return self.fc(self.table(shifted)[:, 0])

    inputs = (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    plan = Placement(capture(Embedded(), inputs), ORT_CPU).plan()
    assert [(u.name, u.kind) for u in plan.integer_units] == [("fc", "linear")]


def test_what_gives_several_values_is_named_and_constants_are_not() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.recurrent(x)[0][:, -1] + torch.zeros(6))

    plan = Placement(capture(Sequence(), torch.randn(3, 5, 4)), ORT_CPU).plan()
    assert [(unit.name, unit.integer) for unit in plan.units] == [("recurrent", False), ("add", False), ("head", True)]


def test_a_misspelt_target_is_told_with_the_nearest() -> None:
    assert get_target("ort-cpu") is ORT_CPU
    with pytest.raises(UsageError, match=r"--target.*'ort-cpuu'.*did you mean 'ort-cpu'"):
        get_target("ort-cpuu")


@settings(
    max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(conv_nets.nets())
def test_in_any_net_units_are_disjoint_and_read_only_integers(net: conv_nets.Net) -> None:
    graph = capture(conv_nets.build(net), conv_nets.example(net))
    fold_batch_norm(graph)
    placement = Placement(graph, ORT_CPU)
    nodes = [node for unit in placement.placed for node in unit.nodes]
    assert len(nodes) == len(set(nodes))
    names = [unit.unit.name for unit in placement.placed]
    assert len(names) == len(set(names))
    weighted = {node for unit in placement.placed if unit.pattern and unit.pattern.weighted for node in unit.operands}
    for unit in placement.placed:
        assert unit.unit.integer or unit.unit.reason
        if unit.pattern is not None and unit.pattern.needs_integer_inputs:
            assert all(placement.is_integer(operand) or operand in weighted for operand in unit.operands)
        if unit.pattern is None:
            assert not placement.is_integer(unit.output)
        for inner, follower in zip(unit.nodes, unit.nodes[1:], strict=False):
            assert list(inner.users) == [follower]


def test_every_dropout_of_a_training_graph_lets_integers_through() -> None:
    parts = nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()
    model = nn.Sequential(nn.Conv2d(4, 4, 1), *parts, nn.Conv2d(4, 4, 1))
    plan = Placement(capture(model, torch.randn(2, 4, 5, 5), train=True), ORT_CPU).plan()
    assert [(unit.kind, unit.integer) for unit in plan.units] == [("conv", True)] * 2


def test_a_detached_value_is_quantized_once() -> None:
    """Detectors detach what one stage gives the next; only gradients know of it."""

    class Stages(nn.Module):
        def __init__(self, detached: bool) -> None:
            super().__init__()
            self.first, self.second, self.detached = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), detached

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            x = x.detach() if self.detached else x
            return x + self.second(x)

    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    forms = []
    for detached in (True, False):
        torch.manual_seed(0)
        forms.append(quantize(Stages(detached).eval(), QuantizeConfig(effort="fast"), example=x, calibration=[x]))
    one, other = ([node.target for node in form.graph.graph.nodes if node.op == "call_function"] for form in forms)
    assert one == other
    assert torch.equal(forms[0](x), forms[1](x))
