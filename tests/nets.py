"""Networks the tests quantise: small ones for every shape of graph, and the ResNet-50 and MobileNetV2 definitions.

Weights are random but seeded, and :func:`settled` runs a few batches in training mode first, so that batch-norm
statistics are those of the activations and ranges stay sane through fifty layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def settled(model: nn.Module, size: int, *, channels: int = 3, batches: int = 4, seed: int = 0) -> nn.Module:
    """``model`` in evaluation mode, its batch-norm statistics those of ``batches`` random batches."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(8, channels, size, size, generator=generator))
    return model.eval()


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution without a bias, then batch-norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """ResNet's 1×1, 3×3, 1×1 block with a projection where shapes change; ResNeXt's with groups."""

    def __init__(self, inputs: int, width: int, stride: int, outputs: int, groups: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(inputs, width, 1),
            nn.ReLU(),
            conv_bn(width, width, 3, stride, groups),
            nn.ReLU(),
            conv_bn(width, outputs, 1),
        )
        self.project = conv_bn(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.project(x))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, and the input added where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        width = inputs * expand
        grow = [conv_bn(inputs, width, 1), nn.ReLU6()] if expand > 1 else []
        self.body = nn.Sequential(
            *grow, conv_bn(width, width, 3, stride, groups=width), nn.ReLU6(), conv_bn(width, outputs, 1)
        )
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


def pooled_classifier(features: int, classes: int) -> list[nn.Module]:
    """Global average, flatten, linear."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)]


def resnet50(
    classes: int = 1000, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, groups: int = 1
) -> nn.Sequential:
    """The ResNet-50 definition (He et al., arXiv:1512.03385, stride in the 3×3); 25.6 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if i == 0 and stage else 1, 256 << stage, groups))
            inputs = 256 << stage
    return nn.Sequential(*layers, *pooled_classifier(inputs, classes))


def resnext50() -> nn.Sequential:
    """The ResNeXt-50 32×4d definition (Xie et al., arXiv:1611.05431); 25.0 M parameters."""
    return resnet50(width=128, groups=32)


MOBILENET = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(classes: int = 1000, stages: tuple[tuple[int, int, int, int], ...] = MOBILENET) -> nn.Sequential:
    """The MobileNetV2 definition (Sandler et al., arXiv:1801.04381); 3.5 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, 32, 3, 2), nn.ReLU6()]
    inputs = 32
    for expand, outputs, count, stride in stages:
        for i in range(count):
            layers.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expand))
            inputs = outputs
    return nn.Sequential(*layers, conv_bn(inputs, 1280, 1), nn.ReLU6(), *pooled_classifier(1280, classes))


def small_resnet(classes: int = 10) -> nn.Sequential:
    """Two bottlenecks: a residual net in miniature."""
    return nn.Sequential(
        conv_bn(3, 16, 3),
        nn.ReLU(),
        Bottleneck(16, 8, 1, 32),
        nn.MaxPool2d(2),
        Bottleneck(32, 16, 2, 64),
        *pooled_classifier(64, classes),
    )


def small_mobilenet(classes: int = 10) -> nn.Sequential:
    """Three inverted residuals with ReLU6."""
    return nn.Sequential(
        conv_bn(3, 16, 3, 2),
        nn.ReLU6(),
        InvertedResidual(16, 16, 1, 1),
        InvertedResidual(16, 24, 2, 6),
        InvertedResidual(24, 24, 1, 6),
        *pooled_classifier(24, classes),
    )


class FeedForward(nn.Module):
    """A transformer's feed-forward half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
