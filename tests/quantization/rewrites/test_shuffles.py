"""Pixel shuffles as rows of channels: the same numbers, and all of it bytes in the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.norms import NORMAL
from qtool.quantization.rewrites.shuffles import write_rows


class Cropped(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, 1:-1, 2:]  # type: ignore[no-any-return]


def shuffled(model: nn.Module, x: Tensor) -> tuple[int, Tensor, list[str]]:
    graph = capture(model.eval(), x)
    count = write_rows(graph, {})
    calls = [
        str(n.target).removeprefix("aten.").partition(".")[0] for n in graph.graph.nodes if n.op == "call_function"
    ]
    return count, graph(x), calls


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.LeakyReLU, nn.SiLU])
@pytest.mark.parametrize("kind", [nn.Sequential, Cropped])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_torch_does(
    stride: int, activation: type[nn.Module], kind: type[nn.Sequential], bias: bool
) -> None:
    model = kind(nn.Conv2d(3, 5 * stride**2, 3, bias=bias), activation(), nn.PixelShuffle(stride))
    x = torch.randn(2, 3, 6, 7)
    count, found, calls = shuffled(model, x)
    assert count == 1
    assert "pixel_shuffle" not in calls
    assert calls[-1] == "permute"  # what is cut off is cut before the channels are turned back
    torch.testing.assert_close(found, model(x))


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffle = nn.Conv2d(4, 4, 1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, self.shuffle(y)


class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffle = nn.Conv2d(4, 4, 1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.shuffle(self.conv(x)), self.conv(x + 1)


STAYS = {
    "no convolution": nn.Sequential(nn.MaxPool2d(2), nn.PixelShuffle(2)),
    "groups": nn.Sequential(nn.Conv2d(4, 8, 1, groups=2), nn.PixelShuffle(2)),
    "another reader": TwoReaders(),
    "a weight that another layer reads": SharedWeight(),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    x = torch.randn(2, 4, 6, 6)
    assert shuffled(STAYS[name], x)[0] == 0


def test_a_net_that_enlarges_images_passes_every_gate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(),
        nn.Conv2d(3, 8, 3, padding=1),
    ).eval()  # fmt: skip
    batches = [torch.randn(8, 3, 10, 10) for _ in range(4)]
    quantized = qtool.quantize(model, batches, effort="fast")
    assert not quantized.plan.float_units
    assert "pixel_shuffle" not in quantized.graph.code
    assert all(gate["passed"] for gate in qtool.export(quantized, tmp_path, samples=batches, baselines=None).gates)
    wanted = model(batches[0])
    assert 10 * torch.log10(wanted.square().sum() / (wanted - quantized(batches[0])).square().sum()) > 30


def test_statistics_of_batch_norm_follow_the_channels() -> None:
    """Channels that differ much in their means: read in another order, a correction by them would do harm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(4, 4, 3, padding=1)
    )
    model[1].weight.data, model[1].bias.data = torch.linspace(0.1, 2, 16), torch.linspace(-1, 3, 16)
    x = torch.randn(32, 3, 10, 10)
    with torch.no_grad():
        for _ in range(20):
            model(x)
    graph = float_form(model.eval(), x)
    write_rows(graph, {})
    conv = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.conv2d.default)
    mean = Recorded(graph, conv).value(x).mean((0, 2, 3))
    torch.testing.assert_close(conv.meta[NORMAL][0], mean, rtol=0.05, atol=0.1)


class Recorded(torch.fx.Interpreter):
    """A graph's value at one of its operators."""

    def __init__(self, graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        super().__init__(graph)
        self.node, self.found = node, torch.empty(0)

    def run_node(self, n: torch.fx.Node) -> Any:
        made = super().run_node(n)
        if n is self.node:
            self.found = made
        return made

    def value(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.run(x)
        return self.found
