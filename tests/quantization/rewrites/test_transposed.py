"""Transposed convolutions as plain ones and a shuffle: the same numbers, and integers in the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from qdq_files import needs_vnni
from torch import Tensor, nn

import qtool
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.norms import NORMAL
from qtool.quantization.rewrites.transposed import write_transposed

TURNED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIDE = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.integers(1, 6))


def kinds(graph: Any) -> list[str]:
    return [str(n.target).removeprefix("aten.").partition(".")[0] for n in graph.graph.nodes if n.op == "call_function"]


def written(model: nn.Module, x: Tensor, *, train: bool = False) -> Any:
    graph = capture(model.train(train), x, train=train)
    write_transposed(graph, {}, train=train)
    return graph


@settings(max_examples=12)
@given(st.lists(SIDE, min_size=1, max_size=3), st.booleans())
def test_it_computes_what_torch_does(sides: list[tuple[int, ...]], bias: bool) -> None:
    kernel, stride, padding, more, size = (list(values) for values in zip(*sides, strict=True))
    assume(all(m < s for m, s in zip(more, stride, strict=True)))
    assume(all((n - 1) * s - 2 * p + k + m > 0 for k, s, p, m, n in sides))
    model = TURNED[len(sides)](3, 2, kernel, stride, padding, more, bias=bias)
    x = torch.randn(2, 3, *size)
    graph = written(model, x)
    assert not any("transpose" in kind and kind.startswith("conv") for kind in kinds(graph))
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


COSTS = {
    "2×2, stride 2": (lambda: nn.ConvTranspose2d(3, 4, 2, 2), (16, 3, 1, 1), ["conv2d", "pixel_shuffle"]),
    "4×4, stride 2": (lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1), (16, 3, 2, 2),
                      ["conv2d", "pixel_shuffle", "slice", "slice"]),
    "3×3, stride 2": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), (16, 3, 2, 2),
                      ["constant_pad_nd", "conv2d", "pixel_shuffle"]),
    "3×3, stride 1": (lambda: nn.ConvTranspose2d(3, 4, 3, 1, 1), (4, 3, 3, 3), ["conv2d"]),
    "strides of their own": (lambda: nn.ConvTranspose2d(3, 4, (2, 3), (2, 3)), (24, 3, 1, 1),
                             ["conv2d", "permute", "unflatten", "permute", "flatten", "flatten", "permute"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_what_it_is_written_as(name: str) -> None:
    make, shape, operators = COSTS[name]
    graph = written(make(), torch.randn(2, 3, 5, 5))
    assert kinds(graph) == operators
    weight = next(value for name, value in graph.named_parameters() if "weight" in name)
    assert weight.shape == shape


def test_from_a_single_place_it_is_one_product() -> None:
    graph = written(nn.ConvTranspose2d(8, 4, 4, 1), torch.randn(2, 8, 1, 1))
    assert next(value for name, value in graph.named_parameters() if "weight" in name).shape == (64, 8, 1, 1)


@pytest.mark.parametrize(
    "model",
    [nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.ConvTranspose2d(4, 4, 3, 2, dilation=2)],
    ids=["groups", "dilation"],
)
def test_what_stays(model: nn.Module) -> None:
    graph = capture(model, torch.randn(2, 4, 5, 5))
    assert write_transposed(graph, {}) == 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Tanh, nn.ReLU6])
def test_what_is_computed_of_each_number_stands_before_the_shuffle(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), activation()).eval()
    x = torch.randn(2, 3, 5, 5)
    graph = written(model, x)
    assert kinds(graph)[0::2] == ["conv2d", "pixel_shuffle"]
    torch.testing.assert_close(graph(x), model(x))


def test_a_weight_that_two_layers_share_is_stored_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 3, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.up(x))

    model, x = Twice(), torch.randn(2, 3, 4, 4)
    graph = written(model, x)
    assert len(list(graph.parameters())) == 2
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize(
    ("layer", "rewritten"),
    [
        (nn.ConvTranspose2d(3, 4, 2, 2), True),
        (nn.ConvTranspose2d(3, 4, 3, 2), False),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4)), True),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.BatchNorm2d(4)), False),
    ],
    ids=["plain", "zeros would train", "batch-norm is folded", "and stays where the layer does"],
)
def test_what_is_going_to_be_trained(layer: nn.Module, rewritten: bool) -> None:
    x = torch.randn(2, 3, 5, 5)
    layer(torch.randn(64, 3, 5, 5))  # moves a batch-norm's statistics
    graph = written(layer, x, train=True)
    assert ("conv_transpose2d" not in kinds(graph)) is rewritten
    assert ("batch_norm" in kinds(graph)) == (isinstance(layer, nn.Sequential) and not rewritten)
    if rewritten:
        torch.testing.assert_close(graph(x), layer.eval()(x), rtol=1e-5, atol=1e-5)
    assert all(value.requires_grad for value in graph.parameters())


class Decoder(nn.Module):
    """A small U: down, up by a transposed convolution, and beside what was there before."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.first = nn.Conv2d(3, 16, 3, 1, 1)
        self.up = up
        self.last = nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(torch.relu(self.down(x)))
        return self.last(torch.cat([up, torch.relu(self.first(x))], 1))  # type: ignore[no-any-return]


UPS = {
    "2×2": lambda: nn.ConvTranspose2d(16, 16, 2, 2),
    "3×3": lambda: nn.ConvTranspose2d(16, 16, 3, 2, 1, 1),
    "4×4, norm, relu": lambda: nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    ),
}


@pytest.mark.parametrize("name", UPS)
def test_every_unit_is_an_integer_kernel_and_all_gates_pass(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(UPS[name]()).eval()
    batches = [torch.randn(8, 3, 12, 12) for _ in range(4)]
    quantized = qtool.quantize(model, batches, effort="fast")
    assert not quantized.plan.float_units
    exported = qtool.export(quantized, tmp_path, samples=batches, baselines=None)
    assert all(gate["passed"] for gate in exported.gates)
    wanted = model(batches[0])
    noise = (quantized(batches[0]) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30
    assert "conv_transpose2d" in kinds(float_form(model, batches[0]))  # the reference keeps it


@needs_vnni
def test_openvino_pads_in_bytes_what_is_padded_before_a_convolution(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 12, 12) for _ in range(2)]
    quantized = qtool.quantize(Decoder(UPS["3×3"]()), batches, effort="fast", target="openvino")
    assert not quantized.plan.float_units
    coverage = {
        gate["name"]: gate for gate in qtool.export(quantized, tmp_path, samples=batches, baselines=None).gates
    }["coverage"]
    assert coverage["passed"]


def test_its_weights_alone_are_integers_where_that_is_asked_for() -> None:
    batches = [torch.randn(4, 3, 12, 12)]
    quantized = qtool.quantize(Decoder(UPS["2×2"]()), batches, weights_only=True)
    assert {unit.name for unit in quantized.plan.units if unit.weight_bits == 8} >= {"up", "down", "first", "last"}


def test_the_first_tap_of_the_kernel_is_the_first_phase() -> None:
    """One tap at a time: where it stands is where torch has it, which equal random numbers could hide."""
    layer = nn.ConvTranspose1d(1, 1, 5, 3, 1, bias=False)
    for tap in range(5):
        layer.weight.data = torch.eye(5)[tap].view(1, 1, 5)
        x = torch.arange(1.0, 5.0).view(1, 1, 4).expand(2, 1, 4).contiguous()
        assert torch.equal(written(layer, x)(x), layer(x))


def test_one_that_is_to_stay_in_float_stays_as_it_is() -> None:
    batches = [torch.randn(4, 3, 12, 12)]
    quantized = qtool.quantize(Decoder(UPS["4×4, norm, relu"]()), batches, overrides={"up.*": "float"})
    assert "conv_transpose2d" in kinds(quantized.graph)
    assert {u.reason for u in quantized.plan.float_units if u.name.startswith("up")} == {"left in float by an override"}


def test_what_batch_norm_tells_of_its_channels_is_not_taken_for_that_of_the_phases() -> None:
    graph = float_form(Decoder(UPS["4×4, norm, relu"]()).eval(), torch.randn(2, 3, 12, 12))
    assert any(NORMAL in node.meta for node in graph.graph.nodes)
    write_transposed(graph, {})
    assert not any(NORMAL in node.meta for node in graph.graph.nodes)
