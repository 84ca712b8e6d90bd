"""Models quantized by hand with eager torch.ao, against torch's own quantized kernels (fbgemm) and ONNX Runtime."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from qdq_files import needs_vnni
from torch import Tensor, nn
from torch.ao.quantization import (
    DeQuantStub,
    MinMaxObserver,
    QConfig,
    QuantStub,
    convert,
    default_weight_observer,
    fuse_modules,
    fuse_modules_qat,
    get_default_qat_qconfig,
    get_default_qconfig,
    prepare,
    prepare_qat,
    quantize_dynamic,
)

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.evaluate import sqnr_db
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.form import QuantizedModel, quantize_nodes, quantized
from qtool.graphs.edits import parameter
from qtool.quantization.engines.eager import from_eager
from qtool.quantization.engines.eager_modules import REBUILT, is_quantized, rebuild
from qtool.runtimes import open_session

nnq = torch.ao.nn.quantized


@contextmanager
def quiet() -> Iterator[None]:
    """torch.ao announces its removal wherever it is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    """What eager models are made of: fused and unfused modules, FloatFunctional, and functions between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.bn2, self.relu6 = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16), nn.ReLU6()
        self.conv3, self.bn3 = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
        self.skip, self.join, self.square, self.total = (nnq.FloatFunctional() for _ in range(4))
        self.pool, self.drop = nn.AdaptiveAvgPool2d(1), nn.Dropout()
        self.hidden, self.relu2, self.linear = nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        x = torch.max_pool2d(x, 2)
        y = self.relu6(self.bn2(self.conv2(x)))
        x = self.skip.add_relu(x, y)
        z = self.bn3(self.conv3(self.total.add(x, y)))
        x = self.join.cat([x, z], 1)
        x = self.square.mul(x, x)
        x = torch.flatten(self.pool(x), 1)
        x = self.relu2(self.hidden(self.drop(x)))
        return self.dequant(self.linear(x))


FUSED = [["conv1", "bn1", "relu1"], ["conv2", "bn2"], ["hidden", "relu2"]]


def batch(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def float_net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net()
        for norm in (net.bn1, net.bn2, net.bn3):
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    return net.eval()


def prepared_net(backend: str = "fbgemm", *, qat: bool = False) -> nn.Module:
    net = float_net()
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if qat:
            net = fuse_modules_qat(net.train(), FUSED)
            net.qconfig = get_default_qat_qconfig(backend)
            made = prepare_qat(net)
        else:
            net = fuse_modules(net, FUSED)
            net.qconfig = get_default_qconfig(backend)
            made = prepare(net)
        with torch.no_grad():
            for seed in range(4):
                made(batch(8, seed))
    return made.eval()


def converted_net(backend: str = "fbgemm", *, qat: bool = False) -> nn.Module:
    with quiet():
        return convert(prepared_net(backend, qat=qat))


def small(net: nn.Module) -> nn.Module:
    """``net`` between stubs, calibrated and converted with fbgemm."""
    made = nn.Sequential(QuantStub(), net, DeQuantStub()).eval()
    made.qconfig = get_default_qconfig("fbgemm")
    with quiet():
        made = prepare(made)
        made(batch(4))
        return convert(made)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with quiet(), torch.no_grad():
        return model(x)


def calls(model: nn.Module, x: Tensor) -> dict[str, tuple[tuple[Any, ...], Tensor]]:
    """The arguments and the result of each quantized module and each operation of a QFunctional, by path."""
    seen: dict[str, tuple[tuple[Any, ...], Tensor]] = {}

    def watch(path: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            seen[path] = (args, result)
            return result

        return call

    for path, module in model.named_modules():
        if isinstance(module, nnq.QFunctional):
            for name in ("add", "add_relu", "mul", "cat"):
                setattr(module, name, watch(f"{path}.{name}", getattr(module, name)))
        elif path and is_quantized(module):
            module.forward = watch(path, module.forward)
    run(model, x)
    return seen


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.dequantize() if isinstance(value, Tensor) and value.is_quantized else value


def unequal_integers(make: Callable[[], nn.Module], x: Tensor) -> dict[str, tuple[int, int]]:
    """How many integers differ from the kernel's, and of how many, by module, each fed with the kernel's input.

    None may be more than one step off.
    """
    model, found = make(), {}
    rebuild(model)
    for path, (args, result) in calls(make(), x).items():
        if result.is_quantized:
            with torch.no_grad():
                ours = model.get_submodule(path)(*(plain(arg) for arg in args))
            steps = ((ours - result.dequantize()) / result.q_scale()).round().abs()
            assert steps.max() <= 1, path
            found[path] = int((steps > 0).sum()), steps.numel()
    return found


@pytest.mark.parametrize("backend", ["fbgemm", "x86"])
@pytest.mark.parametrize("qat", [False, True])
def test_each_module_gives_the_integers_of_the_kernel(backend: str, qat: bool) -> None:
    found = unequal_integers(lambda: converted_net(backend, qat=qat), batch(128))
    assert {"conv1", "conv2", "conv3", "bn3", "relu6", "hidden", "linear", "skip.add_relu", "total.add"} <= set(found)
    assert all(unequal <= max(3, total // 10_000) for unequal, total in found.values()), found
    assert sum(unequal for unequal, _ in found.values()) <= sum(total for _, total in found.values()) / 10_000


@pytest.mark.parametrize("qat", [False, True])
def test_the_whole_is_as_close_to_the_kernels_as_single_steps_allow(qat: bool) -> None:
    made = from_eager(converted_net(qat=qat), (batch(2),))
    model, x = converted_net(qat=qat), batch(256)
    wanted, got = run(model, x), made(x)
    steps = ((wanted - got) / float(model.linear.scale)).round().abs()
    assert steps.max() <= 3  # of 255, after seven layers; int32 biases, which fbgemm keeps in float, flip 1 in 3,000
    assert (steps == 0).float().mean() > 0.9
    assert sqnr_db(wanted, got) > 30


def test_scales_zero_points_and_weights_are_carried_as_they_are() -> None:
    model = converted_net()
    made = from_eager(model, (batch(2),))
    grids = {node.meta["custom"]["unit"]: node.args[1:] for node in quantize_nodes(made.graph)}
    modules = {
        "x": model.quant,
        "conv1": model.conv1,
        "hidden": model.hidden,
        "skip.add_relu": model.skip,
        "bn3": model.bn3,
    }
    for unit, module in modules.items():
        assert grids[unit] == (float(module.scale), int(module.zero_point), 0, 255, torch.uint8), unit
    weights = [n for n in made.graph.graph.nodes if n.target is quantized.dequantize_per_channel.default]
    stored = {name: value for name, value in made.graph.named_buffers() if value.dtype == torch.int8}
    weights = [n for n in weights if n.args[0].target in stored]
    assert len(weights) == 5
    for node, module in zip(weights, (model.conv1, model.conv2, model.conv3, model.hidden, model.linear), strict=True):
        assert torch.equal(stored[node.args[0].target], module.weight().int_repr())
        assert torch.equal(parameter(made.graph, node.args[1]), module.weight().q_per_channel_scales().float())
        assert node.args[3:] == (0, -128, 127, torch.int8)


def test_the_plan_names_every_unit_as_the_model_does() -> None:
    plan = from_eager(converted_net(), (batch(2),)).plan
    kinds = {unit.name: unit.kind for unit in plan.integer_units}
    assert kinds == {
        "conv1": "conv", "max_pool2d": "max_pool", "conv2": "conv", "skip.add_relu": "add", "total.add": "add",
        "conv3": "conv", "join.cat": "concat", "square.mul": "mul", "pool": "global_avg_pool", "hidden": "linear",
        "linear": "linear",
    }  # fmt: skip
    assert {unit.name for unit in plan.float_units} == {"relu6", "bn3"}  # between integers, but with no kernel


def test_a_prepared_model_is_converted_on_a_copy() -> None:
    model = prepared_net().train()
    before = copy.deepcopy(model.state_dict())
    made = from_eager(model, (batch(2),), float_net())
    x = batch(8)
    assert torch.equal(made(x), from_eager(converted_net(), (batch(2),))(x))
    assert model.training
    assert isinstance(model.quant, QuantStub)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert made.float_graph is not None
    with torch.no_grad():
        assert torch.allclose(made.float_graph(x), float_net()(x), atol=1e-5)


def test_onnx_runtime_gives_the_same_integers(tmp_path: Path) -> None:
    made = from_eager(converted_net(), (batch(2),))
    save(quantized_to_onnx(made, 21), tmp_path / "m.onnx")
    x = batch(64)
    session = open_session(tmp_path / "m.onnx")
    (got,) = session.run({session.inputs[0].name: x.numpy()})
    session.close()
    wanted = run(converted_net(), x)
    steps = ((wanted - torch.from_numpy(got)) / float(converted_net().linear.scale)).round().abs()
    assert steps.max() <= 3
    assert sqnr_db(wanted, torch.from_numpy(got)) > 35


def test_it_is_saved_and_loaded_as_any_other(tmp_path: Path) -> None:
    made = from_eager(converted_net(), (batch(2),))
    made.save(tmp_path)
    again = QuantizedModel.load(tmp_path, made.plan)
    assert again.float_graph is None
    assert torch.equal(again(batch(3)), made(batch(3)))


def test_averages_on_one_grid_round_halves_to_even() -> None:
    model, x = small(nn.AvgPool2d(2)), batch(64)
    made = from_eager(model, (batch(2),))
    scale, zero_point = float(model[0].scale), int(model[0].zero_point)
    integers = (run(model[0], x).int_repr().double() - zero_point).unflatten(3, (8, 2)).unflatten(2, (8, 2))
    average = integers.sum((3, 5)) / 4
    assert (average % 1 == 0.5).double().mean() > 0.2
    assert torch.equal((made(x).double() / scale).round(), average.round())
    assert ((made(x) - run(model, x)) / scale).abs().max() < 1.5  # the kernel adds the zero point before it rounds


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "reflect": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1), nn.ReLU()),
    "leaky": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, dilation=2), nn.LeakyReLU(0.1)),
    "hardswish": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardswish()),
    "elu": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ELU()),
    "sigmoid": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()),
    "flatten": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 3)),
    "upsample": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.UpsamplingNearest2d(scale_factor=2)),
    "rows": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 3, stride=2), nn.ReLU()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules(name: str) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return small(OTHERS[name]())

    x = batch(32)
    found = unequal_integers(make, x)
    assert all(unequal <= max(3, total // 1000) for unequal, total in found.values()), found
    assert sqnr_db(run(make(), x), from_eager(make(), (batch(2),))(x)) > 40


@needs_vnni
def test_a_fused_relu_clips_where_the_grid_does_not() -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 3), nn.ReLU(), DeQuantStub()).eval()
        net = fuse_modules(net, ["1", "2"])
        symmetric = MinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_tensor_symmetric)
        net.qconfig = QConfig(activation=symmetric, weight=default_weight_observer)  # one scale for the whole weight
        with quiet():
            net = prepare(net)
            net(batch(4))
            return convert(net)

    assert int(make()[1].zero_point) == 128
    assert unequal_integers(make, batch(8))["1"][0] <= 3
    made = from_eager(make(), (batch(2),))
    assert made(batch(8)).min() == 0
    assert sqnr_db(run(make(), batch(8)), made(batch(8))) > 40


def test_a_layer_that_was_left_in_float_is_float_in_the_plan() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.dequant(self.first(self.quant(x))))

    net = Half().eval()
    net.qconfig = get_default_qconfig("fbgemm")
    net.second.qconfig = None
    with quiet():
        net = prepare(net)
        net(batch(4))
    units = {unit.name: unit for unit in from_eager(net, (batch(2),)).plan.units}
    assert units["first"].integer
    assert units["first"].weight_bits == 8
    assert not units["second"].integer
    assert units["second"].weight_bits is None
    assert "float in the model" in units["second"].reason


def test_a_clip_that_changes_no_integer_joins_the_unit_before_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6()).eval()
    nn.init.constant_(net[0].bias, 1.0)
    nn.init.uniform_(net[0].weight, -0.01, 0.01, generator=torch.Generator().manual_seed(0))
    model = small(net)  # the convolution's grid lies between 0 and 6
    made = from_eager(model, (batch(2),))
    assert [unit.modules for unit in made.plan.units] == [("1.0", "1.1")]
    steps = (made(batch(8)) - run(model, batch(8))) / float(model[1][0].scale)
    assert steps.abs().max() < 1.5


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Scalar(nn.Module):
    def __init__(self, operation: str) -> None:
        super().__init__()
        self.work, self.operation = nnq.FloatFunctional(), operation

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.work, self.operation)(x, 1.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: float_net(), "modules that torch.ao prepared or converted; got none"),
        (lambda: small(nn.Conv2d(3, 4, 1))[1:], "runs on example_inputs"),
        (lambda: small(nn.InstanceNorm2d(3, affine=True)), "'1': expected a module that can be rebuilt; got a torch"),
        (lambda: small(Plus()), "FloatFunctional in place of"),
        (lambda: small(Tanh()), "'1': expected an operation that torch has for quantized tensors; got tanh"),
        (lambda: small(Scalar("add_scalar")), "^eager model, '1.work.add_scalar': expected a module that can be rebui"),
        (lambda: small(Scalar("mul_scalar")), "^eager model, '1.work.mul_scalar': expected a module that can be rebui"),
        (lambda: dynamic(), "quantized.dynamic"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(make: Any, words: str) -> None:
    with quiet():
        model = make()
    with pytest.raises(QtoolError, match=words.replace(".", r"\.")):
        from_eager(model, (batch(2),))


def dynamic() -> nn.Module:
    return quantize_dynamic(nn.Sequential(nn.Flatten(), nn.Linear(768, 3)))


def test_observers_without_data_are_an_error() -> None:
    net = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1), DeQuantStub()).eval()
    net.qconfig = get_default_qconfig("fbgemm")
    with quiet():
        net = prepare(net)
    with quiet(), pytest.raises(QtoolError, match="observers that saw calibration data"):
        from_eager(net, (batch(2),))


@pytest.mark.parametrize("make", [prepared_net, partial(prepared_net, qat=True), converted_net, dynamic])
def test_the_door_for_float_models_is_told_of(make: Callable[[], nn.Module]) -> None:
    with quiet():
        model = make()
    with pytest.raises(UsageError, match=r"one that torch\.ao prepared or converted: .* or this one to qtool\.export"):
        qtool.quantize(model, [batch(4)])


def test_stubs_and_functional_modules_alone_leave_a_model_in_float() -> None:
    assert qtool.quantize(float_net().eval(), [batch(4)], ranges="minmax").plan.integer_units


def test_every_rebuilt_kind_is_one_that_torch_has() -> None:
    assert all(is_quantized(kind.__new__(kind)) for kind in REBUILT)


def test_a_torch_without_eager_quantization_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.ao.nn.intrinsic.quantized", None)
    for name in ("eager", "eager_modules"):
        monkeypatch.delitem(sys.modules, f"qtool.quantization.engines.{name}")
    with pytest.raises(QtoolError, match=r"a torch with torch\.ao's quantized modules; got torch"):
        importlib.import_module("qtool.quantization.engines.eager")


class Tokens(nn.Module):
    """Linear layers over sequences: two that read one input, an activation, a sum, and one behind a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.skip = QuantStub(), DeQuantStub(), nnq.FloatFunctional()
        self.conv, self.one, self.two = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.relu, self.last = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(self.quant(x.transpose(1, 2))).transpose(1, 2)
        x = self.skip.add(self.relu(self.one(x)), self.two(x))
        return self.dequant(self.last(x)), self.dequant(x)


def test_linear_layers_over_sequences_are_integer_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Tokens().eval()
    net.qconfig = get_default_qconfig("fbgemm")  # type: ignore[assignment]
    with quiet():
        ready = prepare(net)
        ready(torch.randn(64, 7, 8))
        made = convert(ready)
    x = torch.randn(32, 7, 8)
    with quiet(), torch.no_grad():
        wanted = made(x)
    exported = qtool.export(made, tmp_path, example_inputs=(x[:2],))
    gates = {gate["name"]: gate for gate in exported.gates}
    assert gates["coverage"]["passed"]
    assert "5 of 5 integer units" in gates["coverage"]["found"]
    session = open_session(exported.files["int8"])
    found = session.run({session.inputs[0].name: x.numpy()})
    for output, wants, scale in zip(found, wanted, (made.last.scale, made.skip.scale), strict=True):
        steps = (torch.from_numpy(output) - wants).abs() / scale
        assert steps.max() < 1.01
        assert (steps > 0.01).float().mean() < 0.02
    session.close()
