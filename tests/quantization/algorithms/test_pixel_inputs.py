"""Inputs that hold bytes: their steps are found, whatever mean and deviation, and quantizing them rounds nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qtool.errors import UsageError
from qtool.exporting.stage import export
from qtool.form import QUANTIZE
from qtool.graphs.edits import copied
from qtool.graphs.pixels import PIXELS
from qtool.quantization.algorithms import Declined, Subject, pixels
from qtool.quantization.algorithms.pixels import grid_of, read_pixels
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import ExportConfig, QuantizeConfig

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
WHOLE = (100 / 255, 100 / 255, 100 / 255), (0.2, 0.25, 0.3)


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nets here are too small for more than what they read."""
    monkeypatch.setattr(pixels, "COPY", 0)
    monkeypatch.setattr(pixels, "CHANNEL", 0)


def bytes_of(samples: int = 32, channels: int = 3, size: int = 16, seed: int = 0) -> Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (samples, channels, size, size), dtype=np.uint8))


def normalized(raw: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    column = (-1, 1, 1)
    return (raw.float() / 255 - torch.tensor(mean).reshape(column)) / torch.tensor(deviation).reshape(column)


def net(padding: int = 1, channels: int = 3, stride: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride, padding), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    ).eval()


def subject(model: nn.Module, batches: list[Tensor], target: str = "ort-cpu") -> Subject:
    graph = copied(float_form(model, batches[0][:2]))
    return Subject(graph, graph, Placement(graph, get_target(target)), batches)


def channels_of(x: Tensor) -> list[Tensor]:
    return [piece.transpose(0, 1).flatten(1) for piece in x.split(8)]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.05, 2.0)), min_size=1, max_size=4),
    st.sampled_from([1.0, 255.0]),
    st.integers(0, 9),
)
def test_the_steps_of_any_normalized_bytes_are_found(channels, unit, seed) -> None:
    mean, deviation = zip(*channels, strict=True)
    raw = bytes_of(16, len(channels), seed=seed)
    raw[0, :, 0, 0], raw[0, :, 0, 1] = 0, 255
    x = normalized(raw, mean, deviation) * unit
    grid = grid_of(channels_of(x))
    places = x.double() / grid.scales.reshape(-1, 1, 1) + grid.zeros.reshape(-1, 1, 1)
    torch.testing.assert_close(places, raw.double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        grid.scales, torch.tensor(deviation).double().reciprocal() * unit / 255, rtol=1e-5, atol=0
    )


def test_what_a_channel_was_not_seen_to_take_is_left_on_both_sides_of_it() -> None:
    grid = grid_of(channels_of(bytes_of().clamp(40, 235).float()))
    assert grid.zeros.tolist() == [0.0] * 3  # of 196 values 60 are left: all below the least, or zero had no byte
    grid = grid_of(channels_of(bytes_of().clamp(40, 235).float() - 45))
    assert grid.zeros.tolist() == [35.0] * 3  # 30 below the least, which is −5, and 30 above the greatest
    grid = grid_of(channels_of(bytes_of().clamp(40, 235).float() - 280))
    assert grid.zeros.tolist() == [255.0] * 3  # the greatest is −45: 45 of the 60 above it, so that zero is a byte


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(16, 3, 16, 16),
        bytes_of().float().sqrt(),
        (bytes_of() > 99).float(),
        bytes_of().float() * 4 + bytes_of(seed=1) % 4,
        bytes_of().clamp(max=100).float(),
        torch.zeros(16, 3, 16, 16),
        torch.cat([bytes_of().float(), bytes_of().float() + 0.3]),
        torch.cat([bytes_of()[:, :2].float(), torch.randn(32, 1, 16, 16)], 1),
        torch.cat([bytes_of().float(), torch.full((8, 3, 16, 16), torch.nan)]),
    ],
    ids=["normal", "uneven", "binary", "10 bits", "dark", "constant", "two lines", "one of three", "nan"],
)
def test_other_values_have_no_steps(x: Tensor) -> None:
    assert grid_of(channels_of(x)) is None


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("mean", "deviation"), [IMAGENET, HALF, WHOLE])
def test_the_float_graph_computes_what_it_did(mean, deviation, padding) -> None:
    x = normalized(bytes_of(), mean, deviation)
    given = subject(net(padding), [x])
    conv = given.placement.layers[0].anchor
    expected = value_of(given.graph, conv.name, x)
    read_pixels(given)
    found = value_of(given.graph, conv.name, x)
    inside = (..., slice(1, -1), slice(1, -1))
    torch.testing.assert_close(found[inside], expected[inside], rtol=0, atol=2e-5)
    border = 2e-5
    if (mean, deviation) == HALF:  # zero lies between two bytes, in all channels alike
        border = 0.5 / 255 / 0.5 * float(net(padding)[0].weight.detach().abs().sum((1, 2, 3)).max())
    torch.testing.assert_close(found, expected, rtol=0, atol=border)


class Own(nn.Module):
    """A network that makes what it is given ready by itself."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare, self.net = prepare, net()
        for name, numbers in zip(("mean", "deviation"), IMAGENET, strict=True):
            self.register_buffer(name, torch.tensor(numbers).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((self.prepare(x) - self.mean) / self.deviation)


OWN = {
    "floats": (Own(lambda x: x), lambda raw: raw.float() / 255, None),
    "whole floats": (Own(lambda x: x / 255), lambda raw: raw.float(), None),
    "bytes": (Own(lambda x: x.float() / 255), lambda raw: raw, torch.uint8),
    "bytes, divided": (Own(lambda x: x / 255), lambda raw: raw, torch.uint8),
    "wide integers": (Own(lambda x: x.float() / 255), lambda raw: raw.long(), None),
    "channels last": (
        Own(lambda x: x.permute(0, 3, 1, 2).float() / 255), lambda raw: raw.permute(0, 2, 3, 1), torch.uint8,
    ),
    "channels last, divided": (
        Own(lambda x: (x / 255).permute(0, 3, 1, 2)), lambda raw: raw.permute(0, 2, 3, 1), torch.uint8,
    ),
    "turned": (Own(lambda x: x * (-1 / 255) + 1), lambda raw: raw.float(), None),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The operators of the file of a network that reads floats."""
    x = torch.randn(16, 3, 16, 16)
    made = quantize(net(), QuantizeConfig(algorithms=None), example=x[:2], calibration=[x])
    files = export(made, tmp_path_factory.mktemp("plain"), ExportConfig(gates=False), samples=[x]).files
    return {node.op_type for node in onnx.load(files["int8"]).graph.node}


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
@pytest.mark.parametrize("name", OWN)
def test_a_model_that_normalizes_by_itself_reads_the_bytes(name, target, tmp_path: Path, plain: set[str]) -> None:
    model, given_of, kind = OWN[name]
    raw = bytes_of()
    x = given_of(raw).contiguous()
    given = subject(model.eval(), [x], target)
    conv = given.placement.layers[0].anchor
    expected = value_of(given.graph, conv.name, x)
    read_pixels(given)
    torch.testing.assert_close(value_of(given.graph, conv.name, x), expected, rtol=0, atol=2e-5)
    assert [placed.unit.name for placed in given.placement.placed if placed.pattern is None] == []
    if target == "ort-cpu" and name != "bytes, divided":
        made = quantize(model.eval(), QuantizeConfig(algorithms=("pixels",)), example=x[:2], calibration=[x])
        file = onnx.load(
            export(made, tmp_path, ExportConfig(baselines=None), samples=[x]).files["int8"]
        )  # the gates run it
        ahead = {node.op_type for node in file.graph.node} - plain
        assert ahead == ({"Transpose", "Pad"} if "last" in name else {"Cast", "Pad"} if "wide" in name else {"Pad"})
        assert (file.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8) == (kind is torch.uint8)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x.to(torch.uint8).float() / 255,
        lambda x: x * torch.tensor([1.0, 0.0, 1.0]).reshape(-1, 1, 1),
        lambda x: (x / 255).sqrt(),
        lambda x: x.half().float() / 255,
        lambda x: (x - torch.tensor([1.0, 2.0, 3.0]).reshape(-1, 1, 1)).transpose(2, 3),
    ],
    ids=["cut off", "a channel left out", "a curve", "half", "moved after"],
)
def test_what_does_more_to_an_image_is_left_as_it_is(prepare) -> None:
    with pytest.raises(Declined, match="read by one integer convolution alone"):
        read_pixels(subject(Own(prepare).eval(), [bytes_of().float()]))


def value_of(graph: torch.fx.GraphModule, name: str, x: Tensor) -> Tensor:
    """What one node of a graph gives."""
    kept: dict[str, Tensor] = {}

    class Kept(torch.fx.Interpreter):
        def run_node(self, node):  # type: ignore[no-untyped-def]
            kept[node.name] = value = super().run_node(node)
            return value

    with torch.no_grad():
        Kept(graph).run(x)
    return kept[name]


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("mean", "deviation"), [IMAGENET, HALF, WHOLE])
def test_the_quantizer_gives_the_bytes(mean, deviation, padding) -> None:
    raw = bytes_of()
    x = normalized(raw, mean, deviation)
    made = quantize(net(padding), QuantizeConfig(), example=x[:2], calibration=[x])
    assert "pixels: the bytes of input are quantized by channel, without an error" in made.plan.notes
    quantizer = next(node for node in made.graph.graph.nodes if node.target in QUANTIZE)
    assert quantizer.args[1] == 1.0
    integers = value_of(made.graph, quantizer.name, x)
    assert integers.shape[1] == (4 if padding == 1 and (mean, deviation) == IMAGENET else 3)
    torch.testing.assert_close(integers[:, :3], raw)
    assert len(integers[:, 3:].unique()) == integers.shape[1] - 3


@pytest.mark.parametrize(("brighter", "clipped"), [(1, False), (4, True)])
def test_the_bytes_are_those_of_all_samples_and_not_of_the_first(brighter, clipped, tmp_path: Path) -> None:
    dark, bright = (normalized(raw, *IMAGENET) for raw in (bytes_of(64).clamp(max=150), bytes_of(8, seed=1)))
    made = quantize(net(0), QuantizeConfig(), example=dark[:2], calibration=[dark, bright * brighter])
    quantizer = next(node for node in made.graph.graph.nodes if node.target in QUANTIZE)
    places = value_of(made.graph, quantizer.args[0].name, bright * brighter)
    ends = [((end - quantizer.args[2]) * quantizer.args[1]) for end in quantizer.args[3:5]]
    assert (bool(places.min() < ends[0]) or bool(places.max() > ends[1])) == clipped
    assert any("more than 256 steps" in note for note in made.plan.notes) == clipped
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(made.ranges))
    again = quantize(net(0), QuantizeConfig(ranges_from=str(path)), example=dark[:2])
    torch.testing.assert_close(again.graph(bright), made.graph(bright), rtol=0, atol=0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.relu(self.conv(x)))


@pytest.mark.parametrize(
    ("model", "target", "reason"),
    [
        (Twice(), "ort-cpu", "read by one integer convolution alone"),
        (Shared(), "ort-cpu", "read by one integer convolution alone"),
        (nn.Conv2d(3, 3, 3, groups=3), "ort-cpu", "read by one integer convolution alone"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), "ort-cpu", "read by one integer convolution alone"),
        (net(), "tensorrt", "read by one integer convolution alone"),
    ],
    ids=["read twice", "shared weight", "grouped", "linear", "symmetric"],
)
def test_what_it_leaves_as_it_is(model, target, reason) -> None:
    given = subject(model.eval(), [normalized(bytes_of(), *IMAGENET)], target)
    with pytest.raises(Declined, match=reason):
        read_pixels(given)
    assert not given.graph.graph.find_nodes(op="call_function", target=PIXELS)


def test_a_late_value_that_is_not_finite_has_no_steps(monkeypatch) -> None:
    monkeypatch.setattr(pixels, "ENOUGH", 1)
    assert grid_of([*channels_of(bytes_of().float()), torch.full((3, 1), torch.nan)]) is None


@pytest.mark.parametrize("offset", [1.0, -2.0])
def test_a_zero_that_lies_beside_all_bytes_is_no_byte_and_still_exact(offset) -> None:
    x = bytes_of().float() / 255 + offset
    given = subject(net(), [x])
    conv = given.placement.layers[0].anchor
    expected = value_of(given.graph, conv.name, x)
    read_pixels(given)
    torch.testing.assert_close(value_of(given.graph, conv.name, x), expected, rtol=0, atol=2e-5)


def test_values_without_steps_and_small_nets_are_told_apart(monkeypatch) -> None:
    with pytest.raises(Declined, match="256 steps"):
        read_pixels(subject(net(), [torch.randn(16, 3, 16, 16)]))
    monkeypatch.setattr(pixels, "COPY", 1e9)
    with pytest.raises(Declined, match="so small that"):
        read_pixels(subject(net(0), [normalized(bytes_of(), *HALF)]))
    monkeypatch.setattr(pixels, "CHANNEL", 1e9)
    with pytest.raises(Declined, match="so small that"):
        read_pixels(subject(net(stride=2), [normalized(bytes_of(), *IMAGENET)]))
    read_pixels(subject(net(0, stride=2), [normalized(bytes_of(), *IMAGENET)]))  # need none
    read_pixels(subject(net(stride=2), [normalized(bytes_of(), *WHOLE)]))
    read_pixels(subject(net(), [normalized(bytes_of(), *IMAGENET)]))  # there is one in any case: three become four
    own = Own(lambda x: x)
    own.net = net(stride=2)
    read_pixels(subject(own.eval(), [bytes_of() / 255]))  # instead of a difference and a quotient


@pytest.mark.parametrize("size", [16, 32])
def test_work_is_products_for_each_number_of_the_image(size) -> None:
    x = normalized(bytes_of(size=size), *IMAGENET)
    products = 16 * 27 * size * size + 16 * 5
    assert pixels._work(subject(net(), [x])) == products / (3 * size * size)


def test_saved_steps_are_repeated_and_never_left_out(tmp_path: Path) -> None:
    x = normalized(bytes_of(), *IMAGENET)
    made = quantize(net(), QuantizeConfig(), example=x[:2], calibration=[x])
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(made.ranges))
    again = quantize(net(), QuantizeConfig(ranges_from=str(path)), example=x[:2])
    torch.testing.assert_close(again.graph(x), made.graph(x), rtol=0, atol=0)
    with pytest.raises(UsageError, match="pixels among --algorithms"):
        quantize(net(), QuantizeConfig(ranges_from=str(path), algorithms=("smooth",)), example=x[:2])


@pytest.mark.parametrize(
    "entry",
    [
        {"scales": [0.1], "zeros": [3.0]},  # of a grey image: numbers that would fit any
        {"scales": [0.1] * 4, "zeros": [3.0] * 4},
        {"scales": [0.1, 0.1, 0.0], "zeros": [3.0] * 3},
        {"scales": [0.1] * 3},
        "damaged",
    ],
)
def test_saved_steps_of_another_image_are_refused(entry) -> None:
    given = subject(net(), [normalized(bytes_of(), *IMAGENET)])
    given.config = QuantizeConfig(ranges_from="ranges.json")
    given.ranges = {"input": {"pixels": entry}}
    with pytest.raises(UsageError, match="for each of the 3 channels of 'input'"):
        read_pixels(given)


@pytest.mark.parametrize(("norm", "operators"), [(IMAGENET, {"Pad"}), (HALF, {"Add"}), (WHOLE, set())])
def test_the_file_quantizes_by_channel_in_one_operator(norm, operators, tmp_path: Path) -> None:
    x = normalized(bytes_of(), *norm)
    made = quantize(net(), QuantizeConfig(), example=x[:2], calibration=[x])
    nodes = onnx.load(
        export(made, tmp_path, ExportConfig(baselines=None), samples=[x]).files["int8"]
    ).graph.node  # the gates run it
    quantizer = next(node for node in nodes if node.op_type == "QuantizeLinear")
    assert quantizer.name == "input/quantize"
    assert {attribute.name: attribute.i for attribute in quantizer.attribute} == {"axis": 1}
    assert {node.op_type for node in nodes} & {"Div", "Round", "Add", "Mul", "Pad"} == operators
