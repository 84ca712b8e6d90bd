"""The torch.ao engine, held against the default one: same calibration, same integers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import conv_nets
import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
from conv_nets import Layer, Net
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from nets import settled
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.errors import QtoolError
from qtool.exporting.stage import export
from qtool.form import QuantizedModel, quantized
from qtool.graphs.edits import parameter
from qtool.models.nets import mobilenet, resnet
from qtool.nested import tensors
from qtool.quantization.capturing.float_form import FloatForms, float_form
from qtool.quantization.engines import torch_ao
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import write_norms
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU
from qtool.recipe import ENGINES, ExportConfig, QuantizeConfig

BUILT_INS = {"resnet": resnet, "mobilenet": mobilenet}


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def built_in(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BUILT_INS[name](10, 1)
        if name == "mobilenet":  # of its residual blocks the first alone: the others are as it is
            model.blocks = nn.Sequential(*(model.blocks[place] for place in (0, 1, 3)))
        return settled(model, 28, channels=1)


def small(*layers: Layer) -> tuple[nn.Module, Any, Any]:
    """A net of these, an example of its inputs, and a batch."""
    net = Net(layers)
    return conv_nets.build(net), conv_nets.example(net), conv_nets.example(net, 16, seed=3)


SHARED = ("analytic-bias", "gptq-small")
"""What the default does with both engines; torch.ao prepares modules, whose graph no pass can change before."""


def both(model: nn.Module, example: Any, calibration: list[Any], **options: Any) -> list[QuantizedModel]:
    options = {"algorithms": SHARED, **options}
    samples: dict[str, Any] = {"example": example, "calibration": calibration, "forms": FloatForms(model)}
    return [quantize(model, QuantizeConfig(engine=engine, **options), **samples) for engine in ("pt2e", "torch.ao")]


def stored(graph: GraphModule) -> dict[str, list[Any]]:
    """For each weighted operator, by unit: the integers, scales and zero points of its weight and bias."""
    found = {}
    for node in graph.graph.nodes:
        if node.target is quantized.dequantize_per_channel.default:
            (reader,) = node.users
            place = "bias" if len(reader.args) > 2 and reader.args[2] is node else "weight"
            found[f"{reader.meta['unit']} {place}"] = [
                *(parameter(graph, argument) for argument in node.args[:3]), *node.args[3:],
            ]  # fmt: skip
    return found


def grids(graph: GraphModule) -> dict[str, Any]:
    """Scale, zero point and limits of each unit's quantizer."""
    nodes = [n for n in graph.graph.nodes if n.target is quantized.quantize_per_tensor.default]
    return {node.meta["custom"]["unit"]: node.args[1:] for node in nodes}


def assert_same(first: QuantizedModel, second: QuantizedModel, x: Any) -> None:
    """Equal to the last bit: both engines run the same float operators on the same folded weights."""
    assert first.plan == second.plan
    assert first.ranges == second.ranges
    assert grids(first.graph) == grids(second.graph)
    ours, theirs = stored(first.graph), stored(second.graph)
    assert ours.keys() == theirs.keys()
    for name in ours:
        for left, right in zip(ours[name], theirs[name], strict=True):
            assert torch.equal(left, right) if isinstance(left, Tensor) else left == right, name
    for left, right in zip(tensors(first(x)), tensors(second(x)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("name", "ranges"), [("resnet", "output"), ("mobilenet", "mse")])
def test_the_engines_agree_on_the_built_in_nets(name: str, ranges: str) -> None:
    model = built_in(name)
    first, second = both(model, images(2), [images(32)], ranges=ranges)
    assert len(stored(second.graph)) >= 20
    assert_same(first, second, images(16, seed=1))


NETS = {
    "clips": (
        Layer(activation="clamp low"), Layer(activation="hardtanh"), Layer(activation="hardtanh inplace"),
        Layer(activation="leaky"),
    ),
    "shared": (Layer("twice", activation="relu6"), Layer("reread", groups="two", bias=True)),
    "norms": (Layer("norm", norm="plain", activation="relu6"), Layer("norm", norm="none", activation="sigmoid")),
    "pools": (Layer("max", activation="leaky"), Layer("avg", activation="relu6 inplace"), Layer("residual")),
    "floats": (
        Layer(activation="gelu"), Layer("residual", activation="tanh"), Layer("max", activation="drawn slope"),
    ),
}  # fmt: skip
OF_RANK = (
    Layer("norm", norm="plain", activation="relu6"), Layer("max", groups="two", bias=True),
    Layer("avg", activation="relu6 inplace"), Layer("residual", norm="none"),
)  # fmt: skip
"""What torch has a module for each number of axes for: convolutions with and without ReLU, norms, pools."""


SCALED = ("none", "relu", "relu inplace", "leaky", "drawn slope", "clamp low")
"""Activations through which pt2e folds the size of a batch-norm's factor into the layer."""


@pytest.mark.parametrize(("layers", "rank"), [*((net, 2) for net in NETS.values()), (OF_RANK, 1), (OF_RANK, 3)])
def test_the_engines_agree_on_small_nets(layers: tuple[Layer, ...], rank: int) -> None:
    whole = layers is NETS["pools"]
    net = Net(layers, rank=rank, inputs=2 if whole else 1, head="linear" if whole else "none")
    example, calibration = conv_nets.example(net), [conv_nets.example(net, 16, seed=3)]
    made = both(conv_nets.build(net), example, calibration, ranges="minmax")  # others are compared above and below
    assert_same(*made, calibration[0])


@settings(max_examples=5, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    net=st.builds(Net, layers=st.lists(conv_nets.layers(), min_size=1, max_size=2).map(tuple), seed=st.integers(0, 99))
)
def test_the_engines_agree_or_torch_ao_says_what_it_cannot_trace(net: Net) -> None:
    example, calibration = conv_nets.example(net), [conv_nets.example(net, 16, seed=3)]
    model = conv_nets.build(net)
    assume(not any(layer.activation in ("hardswish", "silu inplace") for layer in net.layers))  # products in pt2e alone
    assume(not any(layer.structure == "norm" and layer.activation in SCALED for layer in net.layers))  # likewise
    if any(layer.structure == "concat" for layer in net.layers):  # its forward asks for shapes
        with pytest.raises(QtoolError, match=r"conv_nets\.py:\d+, use --engine pt2e"):
            quantize(model, QuantizeConfig(engine="torch.ao"), example=example, calibration=calibration)
    else:
        assert_same(*both(model, example, calibration), calibration[0])


def test_overrides_leave_the_same_units_in_float() -> None:
    model, example, batch = small(Layer(), Layer("residual"), Layer("max"))
    first, second = both(model, example, [batch], ranges="minmax", overrides={"blocks.1.*": "float"})
    assert any(unit.name == "blocks.1.conv" for unit in second.plan.float_units)
    assert_same(first, second, batch)


def test_saved_ranges_of_one_engine_serve_the_other(tmp_path: Path) -> None:
    model, example, batch = small(Layer(), Layer("residual"))
    config = QuantizeConfig(algorithms=SHARED)
    first = quantize(model, config, example=example, calibration=[batch])
    (tmp_path / "ranges.json").write_text(json.dumps(first.ranges))
    repeated = dataclasses.replace(config, ranges_from=str(tmp_path / "ranges.json"))
    again = [quantize(model, dataclasses.replace(repeated, engine=engine), example=example) for engine in ENGINES]
    assert_same(*again, batch)
    assert torch.equal(first(batch), again[1](batch))


def prepared(model: nn.Module, *, train: bool) -> GraphModule:
    graph = float_form(model, images(2))
    write_norms(graph)
    return torch_ao.prepare(model, Placement(graph, ORT_CPU), images(2), train=train).graph


def kinds(graph: GraphModule) -> dict[str, type]:
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    return {path: type(graph.get_submodule(path)) for path in calls if "activation_post_process" not in path}


def test_modules_are_fused_as_torch_ao_fuses_them() -> None:
    resnet_modules = kinds(prepared(built_in("resnet"), train=False))
    assert resnet_modules["stem.0"] is nni.ConvReLU2d
    assert resnet_modules["blocks.0.body.3"] is nn.Conv2d  # the ReLU comes after the sum
    trained = kinds(prepared(built_in("resnet"), train=True))
    assert trained["stem.0"] is nniqat.ConvBnReLU2d
    assert trained["blocks.0.body.3"] is nniqat.ConvBn2d
    assert not any(issubclass(kind, nn.BatchNorm2d) for kind in trained.values())


def test_training_leaves_the_statistics_of_instance_norm() -> None:
    graph = prepared(nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True)), train=True)
    torch_ao.switch(graph, batch_norm=True, dropout=True)
    graph(images(4) + 3)
    assert torch.equal(graph.get_submodule("1").running_mean, torch.zeros(2))


def test_the_model_is_left_as_it_was() -> None:
    model, example, batch = small(Layer(activation="relu6"), Layer("norm", norm="plain"))
    before = {name: value.clone() for name, value in model.train().state_dict().items()}
    quantize(model, QuantizeConfig(engine="torch.ao"), example=example, calibration=[batch])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:  # torch.export knows this number, a symbolic trace does not
            return self.conv(x)
        return x


def test_a_model_that_fx_cannot_trace_is_told_its_line() -> None:
    line = Asks.forward.__code__.co_firstlineno + 1
    with pytest.raises(QtoolError, match=rf"model 'Asks'.*test_torch_ao\.py:{line}, use --engine pt2e"):
        quantize(Asks().eval(), QuantizeConfig(engine="torch.ao"), example=images(2), calibration=[images(4)])
    assert quantize(Asks().eval(), QuantizeConfig(), example=images(2), calibration=[images(4)]).plan.integer_units


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).chunk(2, 1)
        return a + b


def test_an_operator_that_gives_several_tensors_is_told() -> None:
    with pytest.raises(QtoolError, match="'chunk' gives several tensors; use --engine pt2e"):
        quantize(Parts().eval(), QuantizeConfig(engine="torch.ao"), example=images(2), calibration=[images(4)])


def test_a_model_that_torch_ao_would_change_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()).eval()
    with pytest.raises(QtoolError, match=r"operators and quantizers of the placement; got .*use --engine pt2e"):
        quantize(model, QuantizeConfig(engine="torch.ao"), example=images(2), calibration=[images(4)])


def test_a_torch_without_fx_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.ao.quantization.quantize_fx", None)
    monkeypatch.delitem(sys.modules, "qtool.quantization.engines.torch_ao")
    with pytest.raises(QtoolError, match=rf"FX graph mode; got torch {torch.__version__.split('+')[0]}.*--engine pt2e"):
        importlib.import_module("qtool.quantization.engines.torch_ao")


def test_what_a_model_does_in_training_alone_is_not_traced() -> None:
    class Path(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)

        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.conv(x)).relu()
            return [y.bernoulli(), y] if self.training else y + x

    graph = prepared(Path(), train=True)
    assert type(graph.get_submodule("conv")) is nniqat.ConvBn2d or type(graph.conv) is nniqat.ConvBnReLU2d
    assert isinstance(graph(images(2)), Tensor)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_slopes_and_upsamplings_have_the_placements_quantizers(mode: str) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(8, 3, 3), nn.Tanh()]
    x = torch.randn(4, 3, 8, 8)
    config = QuantizeConfig(engine="torch.ao", effort="fast")
    form = quantize(nn.Sequential(*layers).eval(), config, example=x, calibration=[x])
    assert len(form.plan.integer_units) == 2 + (mode == "nearest")


@pytest.mark.parametrize("mode", ["ptq", "qat"])
def test_layers_over_sequences_are_integer_kernels(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU6(), nn.Linear(24, 3)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(32, 6, 12)

    def quantized_by(engine: str) -> QuantizedModel:
        config = QuantizeConfig(engine=engine, mode=mode, ranges="minmax", algorithms=None)
        return quantize(model, config, example=x[:2], calibration=[x], qat=None if mode == "ptq" else lambda *_: None)

    form = quantized_by("torch.ao")
    gates = {gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates}
    assert gates["coverage"]["found"] == "3 of 3 integer units run in integers"
    assert torch.equal(form(x), quantized_by("pt2e")(x))


def test_batch_norms_without_a_weight_are_trained_as_they_are() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8, affine=False),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4, affine=False),
    )
    for norm in (net[1], net[4]):
        nn.init.normal_(norm.running_mean, std=0.3)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    x = images(32)
    learned: list[bool] = []

    def look(graph: GraphModule, *_: Any) -> None:
        norms = [module for module in graph.modules() if isinstance(module, nn.BatchNorm2d)]
        learned.extend(weight.requires_grad for norm in norms for weight in (norm.weight, norm.bias))

    config = QuantizeConfig(engine="torch.ao", mode="qat", algorithms=None)
    made = quantize(net.eval(), config, example=x[:2], calibration=[x], qat=look)
    wanted = net(x)
    error = (made(x) - wanted).square().sum() / wanted.square().sum()
    assert -10 * error.log10() > 30
    assert learned == [False] * 4
