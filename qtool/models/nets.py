"""Two small nets for images of 28 to 32 pixels, each of about a quarter of a million parameters.

``resnet`` is made of conv-bn-relu units and residual sums followed by a ReLU (He et al., arXiv:1512.03385);
``mobilenet`` of inverted residuals: 1×1 expansion, 3×3 depthwise, ReLU6 after both, and a linear 1×1 projection that is
added to the input (Sandler et al., arXiv:1801.04381). Between them they hold what an INT8 runtime has to fuse.

Both halve the image before the first block, ``resnet`` after a look at every pixel, which is what makes them fast to
train on a CPU. Every module is used once, so that a module path names one operator.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias that keeps the size (divided by ``stride``), and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class ResidualBlock(nn.Module):
    """``relu(body(x) + shortcut(x))``: two 3×3 convolutions, and a 1×1 shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_bn(inputs, outputs, 3, stride), nn.ReLU(), *conv_bn(outputs, outputs))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


class InvertedResidual(nn.Module):
    """Expands, filters each channel, projects; adds its input where the shape is kept."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.body = nn.Sequential(
            *conv_bn(inputs, hidden, 1), nn.ReLU6(),
            *conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(),
            *conv_bn(hidden, outputs, 1),
        )  # fmt: skip
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


def resnet(num_classes: int, in_channels: int) -> nn.Module:
    """N×C×H×W images to N×classes logits, by 172,000 parameters: three residual blocks of 24, 48 and 96 channels."""
    stem = nn.Sequential(*conv_bn(in_channels, 16), nn.ReLU(), nn.MaxPool2d(2))
    blocks = nn.Sequential(ResidualBlock(16, 24, 1), ResidualBlock(24, 48, 2), ResidualBlock(48, 96, 2))
    return _assembled({"stem": stem, "blocks": blocks}, 96, num_classes)


def mobilenet(num_classes: int, in_channels: int) -> nn.Module:
    """N×C×H×W images to N×classes logits, by 232,000 parameters: six inverted residuals of 16, 40 and 96 channels."""
    stem = nn.Sequential(*conv_bn(in_channels, 16, 3, 2), nn.ReLU6())
    plan = [(16, 16, 1), (16, 40, 2), (40, 40, 1), (40, 96, 2), (96, 96, 1), (96, 96, 1)]
    blocks = nn.Sequential(*(InvertedResidual(*block, expansion=4) for block in plan))
    head = nn.Sequential(*conv_bn(96, 256, 1), nn.ReLU6())
    return _assembled({"stem": stem, "blocks": blocks, "head": head}, 256, num_classes)


def _assembled(parts: dict[str, nn.Module], width: int, num_classes: int) -> nn.Module:
    """The parts in order, then the mean over the image and a linear classifier."""
    last = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": nn.Linear(width, num_classes)}
    return nn.Sequential(OrderedDict({**parts, **last}))
