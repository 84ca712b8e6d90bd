"""Nets that are hard to quantize on purpose: channels of one tensor that differ by orders of magnitude.

``scaled_mobilenet`` is an inverted-residual net whose channels were rescaled and shifted where that changes nothing
in float: across the depthwise convolutions (activation ReLU) and along the residual stream. It computes what a tame net
does, and per-tensor activations lose most of it. ``hard_transformer`` has three channels in each layer norm that stick
out, as trained transformers have. ``images`` are smooth, as real ones are.

A ``hard_mobilenet`` is made, and captured, once in a process: nothing may change it.
"""

from __future__ import annotations

import functools

import torch
from nets_modern import VisionTransformer
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from qtool.graphs.edits import copied
from qtool.quantization.capturing.float_form import FloatForms
from qtool.recipe import QuantizeConfig


class Block(nn.Module):
    """Expand, depthwise, project with biases; the input is added where ``skip``."""

    def __init__(self, inputs: int, outputs: int, width: int, activation: type[nn.Module], stride: int = 1) -> None:
        super().__init__()
        self.expand = nn.Conv2d(inputs, width, 1)
        self.depthwise = nn.Conv2d(width, width, 3, stride, 1, groups=width)
        self.project = nn.Conv2d(width, outputs, 1)
        self.act1, self.act2 = activation(), activation()
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.act2(self.depthwise(self.act1(self.expand(x)))))
        return x + y if self.skip else y


class HardNet(nn.Module):
    """A stem, three blocks, pooling and a classifier."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), activation())
        self.blocks = nn.Sequential(
            Block(16, 24, 48, activation, 2), Block(24, 24, 72, activation), Block(24, 24, 72, activation)
        )
        self.head = nn.Sequential(nn.Conv2d(24, 64, 1), activation())
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


@functools.cache
def hard_mobilenet(activation: type[nn.Module] = nn.ReLU, spread: float = 2.0, seed: int = 0) -> HardNet:
    """A net in evaluation mode whose channels inside the blocks are scaled by e^(±``spread``), exactly undone later."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HardNet(activation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.4)
        for block in model.blocks:
            factors = [
                torch.exp((torch.rand(block.depthwise.out_channels, generator=generator) * 2 - 1) * spread)
                for _ in range(2)
            ]
            _rescale(block, *factors)
    return model


forms = functools.cache(FloatForms)
"""Of a net that is made once."""


def form_of(model: nn.Module, example: Tensor) -> GraphModule:
    """A copy of its float form."""
    kept = forms(model) if isinstance(model, HardNet) else FloatForms(model)
    return copied(kept(QuantizeConfig(), example))


def _rescale(block: Block, first: Tensor, second: Tensor) -> None:
    """Scales what leaves ``expand`` and ``depthwise`` by channel: with ReLU the block computes the same."""
    block.expand.weight.mul_(first[:, None, None, None])
    block.expand.bias.mul_(first)
    block.depthwise.weight.mul_((second / first)[:, None, None, None])
    block.depthwise.bias.mul_(second)
    block.project.weight.div_(second[:, None, None])


def images(count: int, size: int = 16, seed: int = 0) -> Tensor:
    """Smooth random images, N×3×size×size."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, size // 4, size // 4, generator=generator)
    return F.interpolate(coarse, size=size, mode="bilinear") + 0.1 * torch.randn(
        count, 3, size, size, generator=generator
    )


def hard_transformer(outliers: float = 20.0, seed: int = 0) -> VisionTransformer:
    """A small vision transformer, 48 pixels, three channels of each norm up to ``outliers`` times as large."""
    torch.manual_seed(seed)
    model = VisionTransformer(10, 48, 6, 96, 4, 4)
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
            few = torch.randperm(96)[:3]
            norm.weight[few] *= outliers * torch.rand(3)
            norm.bias[few] += outliers / 10 * torch.randn(3)
    return model.eval()


def image_sets() -> dict[str, list[tuple[Tensor, int]]]:
    """512 images of 48 pixels to calibrate on and 500 others, without labels that mean anything."""
    return {
        part: [(x, 0) for x in images(count, 48, seed)] for part, count, seed in (("train", 512, 1), ("test", 500, 2))
    }
