"""The nets that the tests of the techniques train, under a name that no other folder's module takes from them.

A compiler looks names up in the module that it knows a forward pass to be from, and pytest calls every ``conftest.py``
alike.
"""

from __future__ import annotations

import torch
from torch import nn

from qtool.models.gpt import GPT


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), *(Layer(64) for _ in range(3)), nn.Linear(64, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), *(Residual(8) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def small_gpt(width: int = 32) -> GPT:
    torch.manual_seed(0)
    return GPT(256, layers=2, width=width, heads=2, context=32)


class Encoder(nn.Module):
    """Blocks whose code has a shortcut for inference, which reads weights and calls no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Head(nn.Module):
    """A head as a classifier's: a layer that is named like one of the blocks, and what has a running average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.norm, self.out = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.linear1(x)).relu())  # type: ignore[no-any-return]


def headed() -> nn.Module:
    model = Encoder()
    model.head, model.overhead = Head(), nn.Identity()
    return model
