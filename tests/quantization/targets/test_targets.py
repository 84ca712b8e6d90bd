"""Targets other than ONNX Runtime's CPU: their formats, what they fuse, and the gates that can be run here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from nets import conv_bn, settled, small_resnet
from onnx import numpy_helper
from qdq_files import needs_vnni
from torch import Tensor, nn

from qtool.errors import UsageError
from qtool.exporting.stage import export
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [conv_bn(3, 16, 3), nn.ReLU(), conv_bn(16, 16, 3), nn.SiLU(), conv_bn(16, 16, 3), nn.Hardswish()]
    return settled(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)), 16)


def exported(target: str, folder: Path) -> tuple[onnx.ModelProto, dict[str, bool | None]]:
    batches = list(torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1)).split(8))
    quantized = quantize(net(), QuantizeConfig(target=target), example=batches[0][:2], calibration=batches)
    assert not quantized.plan.float_units
    result = export(quantized, folder, ExportConfig(baselines=None), samples=batches)
    return onnx.load(result.files["int8"]), {gate["name"]: gate["passed"] for gate in result.gates}


def test_tensorrt_has_symmetric_int8_float_biases_and_whole_layers(
    tmp_path: Path,
) -> None:
    model, gates = exported("tensorrt", tmp_path)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == 6  # input, three layers, pooling, and the same again reshaped
    assert all(constants[node.input[2]].dtype == "int8" and not constants[node.input[2]].any() for node in quantizers)
    assert not any(value.dtype == "int32" for value in constants.values())
    assert gates["unit parity"] is gates["end-to-end parity"] is gates["size"] is True
    assert gates["coverage"] is gates["integer reference"] is None


@needs_vnni
def test_openvino_runs_the_file_in_eight_bits(tmp_path: Path) -> None:
    model, gates = exported("openvino", tmp_path)
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 5  # none behind the reshape
    assert gates["coverage"] is (True if importlib.util.find_spec("openvino") else None)


@needs_vnni
def test_openvino_adds_a_residual_branch_before_it_rounds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = settled(small_resnet(), 16), list(torch.randn(16, 3, 16, 16).split(8))
    files = {}
    for target in ("openvino", "ort-cpu"):
        quantized = quantize(model, QuantizeConfig(target=target), example=batches[0][:2], calibration=batches)
        assert not quantized.plan.float_units
        result = export(
            quantized, tmp_path / target, ExportConfig(baselines=None), samples=batches
        )  # the gates are the proof
        files[target] = onnx.load(result.files["int8"]).graph
    sources = {output: node.op_type for node in files["openvino"].node for output in node.output}
    sums = [node for node in files["openvino"].node if node.op_type == "Add"]
    assert [sorted(sources[name] for name in node.input) for node in sums] == [["Conv", "DequantizeLinear"]] * 2
    counts = {name: sum(node.op_type == "QuantizeLinear" for node in graph.node) for name, graph in files.items()}
    assert counts["openvino"] == counts["ort-cpu"] - len(sums) - 1  # none behind the flattening


@pytest.mark.parametrize(
    ("add", "unrounded"),
    [
        (lambda a, b: a + b, {"b"}), (lambda a, b: torch.add(a, b, alpha=2), {"a", "b"}),
        (lambda a, b: (a + b) * a, {"b"}), (lambda a, b: a + b + b, set()), (lambda a, b: b + b, set()),
    ],
    ids=["a sum", "a scaled sum", "the first has two readers", "the second has two", "with itself"],
)  # fmt: skip
def test_a_result_stays_unrounded_only_for_a_sum_with_an_integer(
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], unrounded: set[str]
) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return add(self.a(x), self.b(x))

    placement = Placement(capture(Branches().eval(), torch.randn(2, 3, 8, 8)), get_target("openvino"))
    found = {placed.unit.name for placed in placement.placed if placed.pattern and not placed.quantized_output}
    assert found == unrounded


def test_cuda_has_no_integer_convolution_and_auto_is_what_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"convolves integers; got 'ort-cuda'.*serve the FP16 file"):
        get_target("ort-cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "tensorrt" else None)
    assert get_target("auto").name == "tensorrt"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_target("auto").name == "ort-cpu"


def test_seven_bits_stop_at_63(tmp_path: Path) -> None:
    weight = get_target("ort-cpu", 7).weight
    assert (weight.qmin, weight.qmax, weight.bits) == (-63, 63, 7)


class Dense(nn.Module):
    """Norm-relu-conv twice, each appended to its input; the pooled relu in front gives nothing negative."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(count) for count in (8, 12, 16))
        self.convs = nn.ModuleList(nn.Conv2d(count, 4, 3, padding=1) for count in (8, 12))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(torch.relu(norm(x)))], 1)
        return self.head(torch.relu(self.norms[-1](x)).mean((2, 3)))


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_counts_zeros_in_averages_as_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 4, 1)).eval()
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    assert not form.plan.float_units
    gates = {
        gate["name"]: gate["passed"] for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates
    }
    assert gates["end-to-end parity"]


@needs_vnni
def test_openvino_joins_parts_that_keep_their_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = settled(Dense(), 16), list(torch.randn(16, 3, 16, 16).split(8))
    quantized = quantize(model, QuantizeConfig(target="openvino"), example=batches[0][:2], calibration=batches)
    result = export(quantized, tmp_path, ExportConfig(baselines=None), samples=batches)  # the gates are the proof
    graph = onnx.load(result.files["int8"]).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    joins = [node for node in graph.node if node.op_type == "Concat"]
    parts = [made_by[name] for node in joins for name in node.input if made_by[name].op_type != "Concat"]
    assert [[made_by[name].op_type for name in node.input] for node in joins] == [
        ["DequantizeLinear", "DequantizeLinear"],
        ["Concat", "DequantizeLinear"],
    ]
    assert len({float(constants[node.input[1]]) for node in parts}) == 3  # no scale is shared
    assert all(constants[node.input[2]].dtype == "int8" and not constants[node.input[2]] for node in parts)
    assert not [node for node in graph.node if node.op_type == "Conv" and "norms" in node.name]
    if importlib.util.find_spec("openvino"):
        kernels = open_session(result.files["int8"], provider="openvino").kernels({"x": batches[0].numpy()})
        assert {kernel.dtype for kernel in kernels if kernel.op == "Concatenation"} == {"int8"}


def test_openvino_joins_what_starts_at_zero_in_uint8() -> None:
    layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)])
    head = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = layers, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([torch.relu(layer(x)) for layer in self.layers], 1))

    placement = Placement(capture(Two().eval(), torch.randn(2, 3, 9, 9)), get_target("openvino"))
    formats = {placed.unit.name: placement.activation_format(placed.output) for placed in placement.placed}
    assert formats["layers.0"].dtype is formats["layers.1"].dtype is torch.uint8
    (joined,) = (placed for placed in placement.placed if placed.unit.kind == "concat")
    assert not joined.quantized_output
    read = Placement(
        capture(nn.Sequential(Two(), nn.Conv2d(4, 4, 1)).eval(), torch.randn(2, 3, 9, 9)), get_target("ort-cpu")
    )
    assert all(placed.quantized_output for placed in read.placed if placed.unit.kind == "concat")


def test_a_part_of_what_openvino_joins_has_no_scale_to_share() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = torch.cat([y, self.b(y)], 1).unflatten(1, (2, 6))
            return z[:, 0].softmax(2) * z[:, 1].sin()

    x = torch.randn(2, 3, 8, 8)
    plan = quantize(Parts().eval(), QuantizeConfig(target="openvino"), example=x, calibration=[x]).plan
    assert [unit.kind for unit in plan.integer_units] == ["conv", "conv", "concat"]


def test_openvino_rounds_the_softmax_of_attention_alone() -> None:
    class Chosen(nn.Module):
        """Two branches and how much of each, as in selective kernels."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            shares = self.b(y.mean((2, 3), keepdim=True)).unflatten(1, (2, 8)).softmax(1)
            return self.b(y * shares[:, 0] + y * shares[:, 1])

    plan = Placement(capture(Chosen().eval(), torch.randn(2, 3, 8, 8)), get_target("openvino")).plan()
    reasons = {unit.kind: unit.reason for unit in plan.float_units}
    assert reasons["softmax"] == "it runs in float"
    assert "is float" in reasons["mul"]


class Mixed(nn.Module):
    """Values mixed by a softmax that stands behind them (arXiv 1805.08318), and one that is computed and positive."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 24, 1), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).flatten(2).chunk(3, 1)
        mixed = v @ (q.transpose(1, 2) @ k).softmax(-1).transpose(1, 2)
        return torch.bmm(self.b(mixed.mean(2)).unflatten(1, (8, 8)), torch.relu(mixed))


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_multiplies_integers_by_what_is_never_negative(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), [torch.randn(8, 3, 4, 4) for _ in range(2)]
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x[0], calibration=x)
    assert sum(unit.kind == "matmul" and unit.integer for unit in form.plan.units) == 3
    gates = {
        gate["name"]: gate["passed"] for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=x).gates
    }
    assert gates["coverage"]
    assert gates["end-to-end parity"]


@pytest.mark.parametrize(
    ("channels", "outputs", "taps", "groups", "width", "integer"),
    [
        (9, 17, (1, 3), 2, 17, False), (9, 16, (1, 3), 2, 17, True), (32, 17, (1, 3), 2, 17, True),
        (9, 17, (1, 3), 1, 17, True), (8, 17, (1, 3), 2, 17, True), (1, 17, (1, 3), 4, 17, False),
        (16, 8, (8,), 1, 20, False), (16, 8, (7,), 1, 20, True), (32, 8, (8,), 1, 20, True), (18, 8, (9,), 1, 20, True),
        (48, 48, (16,), 2, 20, True), (8, 8, (3, 1), 1, 16, False), (8, 8, (3, 1), 1, 17, True),
        (8, 8, (3, 1), 1, 49, False), (9, 8, (3, 1), 1, 16, True), (16, 8, (3, 8), 1, 20, False),
        (6, 17, (3, 3, 3), 2, 8, True), (32, 8, (3, 3), 1, 1, True),
    ],
)  # fmt: skip
def test_openvino_leaves_convolutions_in_float_about_which_its_kernel_errs(
    channels: int, outputs: int, taps: tuple[int, ...], groups: int, width: int, integer: bool
) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(taps) - 1]
    pads = tuple(size // 2 for size in taps[:-1])
    wide = layer(channels * groups, outputs * groups, taps, groups=groups, padding=(*pads, 0))
    x = torch.randn(2, channels * groups, *[4] * len(pads), width + taps[-1] - 1)
    model = nn.Sequential(wide, nn.ReLU(), layer(outputs * groups, 4, 1)).eval()
    units = {unit.name: unit for unit in Placement(capture(model, x), get_target("openvino")).plan().units}
    assert units["0"].integer is integer


@pytest.mark.parametrize(
    ("size", "options", "integer"),
    [
        ((8, 2), {"stride": 2}, True), ((8, 2), {"stride": (2, 1)}, True), ((2, 2), {"stride": 2}, True),
        ((8, 4), {"stride": 2}, True), ((9, 9), {"dilation": 2}, True),
        ((9, 9), {"dilation": (2, 1), "kernel_size": (5, 3)}, False),
        ((9, 9), {"dilation": (1, 2), "kernel_size": (5, 3)}, True),
    ],
)  # fmt: skip
def test_openvino_leaves_tall_windows_set_apart_in_float_and_no_single_columns(
    size: tuple[int, int], options: dict[str, Any], integer: bool
) -> None:
    layer = nn.Conv2d(32, 32, padding=1, **{"kernel_size": 3, **options})
    model = nn.Sequential(layer, nn.ReLU(), nn.Conv2d(32, 4, 1)).eval()
    placement = Placement(capture(model, torch.randn(2, 32, *size)), get_target("openvino"))
    assert placement.plan().units[0].integer is integer


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_convolves_few_channels_and_single_columns_to_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    grouped, tall = nn.Conv2d(18, 66, 3, padding=1, groups=2), nn.Conv2d(16, 32, (3, 1), padding=(1, 0))
    layers = [grouped, nn.ReLU(), nn.Conv2d(66, 16, 1), nn.ReLU(), tall, nn.ReLU(), nn.Conv2d(32, 8, (1, 15), (1, 2))]
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 18, 8, 16)
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    gates = {gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=[x]).gates}
    assert form.plan.units[-1].integer  # a single column at a stride
    assert gates["coverage"]["passed"]
    assert gates["end-to-end parity"]["details"]["sqnr_db_file"] > 30


def test_openvino_takes_grouped_convolutions_whose_batch_norm_was_folded() -> None:
    torch.manual_seed(0)
    depthwise = [nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), *depthwise, nn.Conv2d(8, 4, 1)).eval(), torch.randn(4, 3, 8, 8)
    form = quantize(model, QuantizeConfig(target="openvino", effort="fast"), example=x, calibration=[x])
    assert not form.plan.float_units


@pytest.mark.parametrize(("name", "rounded"), [("ort-cpu", True), ("openvino", False)])
def test_a_convolution_gives_float_where_only_float_reads_it_and_the_kernel_can(name: str, rounded: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.LayerNorm(12), nn.Conv2d(4, 2, 1))
    placement = Placement(capture(model.eval(), torch.randn(2, 3, 16, 16)), get_target(name))
    convolutions = [placed for placed in placement.placed if placed.unit.kind == "conv"]
    assert all(placed.unit.integer for placed in convolutions)
    assert [placed.quantized_output for placed in convolutions] == [True, rounded, rounded]


VOLUMES = {
    "one channel": (nn.Conv3d(1, 32, 3), False),
    "eight": (nn.Conv3d(8, 32, (1, 3, 3), padding=(0, 1, 1)), False),
    "sixteen": (nn.Conv3d(16, 32, 3), True),
    "sixteen, a stride": (nn.Conv3d(16, 32, 3, stride=2), True),
    "sixteen, of few outputs": (nn.Conv3d(16, 8, 3), False),
    "more, of few outputs": (nn.Conv3d(32, 8, 3), True),
    "groups": (nn.Conv3d(64, 64, 3, groups=4), False),
    "wide groups": (nn.Conv3d(64, 64, 3, groups=2), True),
    "depthwise": (nn.Conv3d(32, 32, 3, groups=32), True),
    "two axes": (nn.Conv2d(1, 32, 3), True),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_onnx_runtime_convolves_few_channels_over_three_axes_in_float(name: str) -> None:
    layer, integer = VOLUMES[name]
    x = torch.randn(2, layer.in_channels, *[5] * len(layer.kernel_size))
    graph = capture(nn.Sequential(layer, nn.ReLU()).eval(), x)
    unit = Placement(graph, get_target("ort-cpu")).plan().units[0]
    assert unit.integer is integer
    assert integer or "three axes" in unit.reason
    assert Placement(graph, get_target("tensorrt")).plan().units[0].integer
