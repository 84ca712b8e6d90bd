"""Definitions whose operators are harder for integers than ResNet's: hard-swish, squeeze-excite, concat, attention.

MobileNetV3-Large, EfficientNet-B0, DenseNet-121 and ViT-S/16 as published, and a U-Net, whose way up is transposed
convolutions; with random weights. :func:`nets.settled` gives batch-norm its statistics.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from nets import conv_bn
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from all channels' means (Hu et al., arXiv:1709.01507)."""

    def __init__(self, width: int, squeezed: int, inner: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.inner, self.gate = inner, gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.inner(self.reduce(self.pool(x)))))


class MobileBlock(nn.Module):
    """Expand, depthwise, squeeze-excite, project: the block of MobileNetV3 and EfficientNet."""

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        se: nn.Module | None,
    ) -> None:
        super().__init__()
        grow = [conv_bn(inputs, width, 1), act()] if width != inputs else []
        gates = [se] if se is not None else []
        depthwise = conv_bn(width, width, kernel, stride, groups=width)
        self.body = nn.Sequential(*grow, depthwise, act(), *gates, conv_bn(width, outputs, 1))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


# kernel, width, outputs, squeeze-excite, hard-swish, stride
LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip


def _eighths(value: float) -> int:
    return max(8, int(value + 4) // 8 * 8)


def mobilenet_v3_large(
    classes: int = 1000, blocks: tuple[tuple[int, int, int, int, int, int], ...] = LARGE, head: int = 1280
) -> nn.Sequential:
    """The MobileNetV3-Large definition (Howard et al., arXiv:1905.02244); 5.5 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, 16, 3, 2), nn.Hardswish()]
    inputs = 16
    for kernel, width, outputs, squeeze, swish, stride in blocks:
        se = SqueezeExcite(width, _eighths(width / 4), nn.ReLU(), nn.Hardsigmoid()) if squeeze else None
        layers.append(MobileBlock(inputs, width, outputs, kernel, stride, nn.Hardswish if swish else nn.ReLU, se))
        inputs = outputs
    layers += [conv_bn(inputs, 6 * inputs, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * inputs, head), nn.Hardswish(), nn.Linear(head, classes))


# expansion, outputs, repeats, stride, kernel
B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip


def efficientnet_b0(
    classes: int = 1000, stages: tuple[tuple[int, int, int, int, int], ...] = B0, head: int = 1280
) -> nn.Sequential:
    """The EfficientNet-B0 definition (Tan and Le, arXiv:1905.11946); 5.3 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, 32, 3, 2), nn.SiLU()]
    inputs = 32
    for expand, outputs, count, stride, kernel in stages:
        for i in range(count):
            width = inputs * expand
            se = SqueezeExcite(width, max(1, inputs // 4), nn.SiLU(), nn.Sigmoid())
            layers.append(MobileBlock(inputs, width, outputs, kernel, stride if i == 0 else 1, nn.SiLU, se))
            inputs = outputs
    layers += [conv_bn(inputs, head, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(head, classes))


class DenseLayer(nn.Module):
    """Norm-relu-conv twice; the new channels are appended to the input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(new)))], 1)


def densenet121(
    classes: int = 1000, blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, width: int = 64
) -> nn.Sequential:
    """The DenseNet-121 definition (Huang et al., arXiv:1608.06993); 8.0 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for index, count in enumerate(blocks):
        for _ in range(count):
            layers.append(DenseLayer(width, growth))
            width += growth
        if index < len(blocks) - 1:
            transition = nn.Conv2d(width, width // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(width), nn.ReLU(), transition, nn.AvgPool2d(2, 2)]
            width //= 2
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class EncoderLayer(nn.Module):
    """Pre-norm attention and a GELU perceptron, each added to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions, encoder layers, a linear head (arXiv:2010.11929)."""

    def __init__(self, classes: int, size: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


def vit_s16(
    classes: int = 1000, size: int = 224, patch: int = 16, width: int = 384, depth: int = 12, heads: int = 6
) -> VisionTransformer:
    """The ViT-S/16 definition (Touvron et al., arXiv:2012.12877, without distillation); 22 M parameters."""
    return VisionTransformer(classes, size, patch, width, depth, heads)


class UNet(nn.Module):
    """The U-Net of arXiv 1505.04597 with batch-norm and padded convolutions: four levels, up by 2×2 transposed ones."""

    def __init__(self, width: int = 32, classes: int = 4, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        pairs = list(pairwise(widths))
        self.first = _double(3, width)
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _double(narrow, wide)) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs))
        self.join = nn.ModuleList(_double(wide, narrow) for narrow, wide in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = [self.first(x)]
        for down in self.down:
            passed.append(down(passed[-1]))
        y = passed.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = join(torch.cat([passed.pop(), up(y)], 1))
        return self.head(y)  # type: ignore[no-any-return]


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*conv_bn(inputs, outputs, 3), nn.ReLU(), *conv_bn(outputs, outputs, 3), nn.ReLU())


def unet() -> UNet:
    """Images to maps of four classes, by 7.8 million parameters."""
    return UNet()
