"""Small convolutional nets drawn by hypothesis: the ways of joining layers that folding and placement must see through.

A net is plain data (`Net` of `Layer`s), so that a failing example prints as the code that builds it again, and its
weights depend on that data alone. ``build`` makes the module; ``example`` its inputs. Layers keep sizes small, since a
test's time goes into capture and export, not arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "relu inplace": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "relu6 inplace": lambda: nn.ReLU6(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(-1.0, 1.0),
    "hardtanh inplace": lambda: nn.Hardtanh(0.0, 3.0, inplace=True),
    "clamp": lambda: Function(lambda x: x.clamp(-0.5, 0.5)),
    "clamp low": lambda: Function(lambda x: x.clamp(min=0)),
    "clamp high": lambda: Function(lambda x: x.clamp(max=0.5)),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "drawn slope": lambda: nn.RReLU(0.1, 0.3),
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
    "silu inplace": lambda: nn.SiLU(inplace=True),
}
FUSED = ("none", "relu", "relu inplace", "relu6", "relu6 inplace", "clamp low", "hardtanh inplace")
"""Activations that are part of a convolution's kernel on every target."""


class Function(nn.Module):
    """A module of one function without parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(*x)


@dataclass(frozen=True)
class Layer:
    """A convolution with what follows it, inside one of the structures of ``Block.forward``.

    ``structure``: plain; residual (the input added, then the activation); concat (with the block's input);
    twice (the same modules applied twice); reread (the convolution's output is read by the activation and again by
    a sum); max or avg (a pooling follows); norm (a batch-norm of its own follows).
    """

    structure: str = "plain"
    channels: int = 8
    kernel: int = 3
    stride: int = 1
    groups: str = "one"
    dilation: int = 1
    bias: bool = False
    norm: str = "affine"
    activation: str = "relu"


@dataclass(frozen=True)
class Net:
    """Layers between an input and a head; ``inputs`` of two are joined by a sum after the first layer."""

    layers: tuple[Layer, ...]
    head: str = "linear"
    rank: int = 2
    inputs: int = 1
    seed: int = 0


KEEPS_SHAPE = ("residual", "twice")


def of_rank(name: str, rank: int) -> Any:
    """A class of ``torch.nn`` for so many spatial axes."""
    return getattr(nn, f"{name}{rank}d")


class Block(nn.Module):
    """One `Layer` as modules."""

    def __init__(self, layer: Layer, inputs: int, rank: int) -> None:
        super().__init__()
        self.structure = layer.structure
        keeps = layer.structure in KEEPS_SHAPE
        outputs = inputs if keeps or layer.groups == "depth" else layer.channels
        conv, norm = of_rank("Conv", rank), of_rank("BatchNorm", rank)
        groups = {"one": 1, "two": 2 if inputs % 2 == outputs % 2 == 0 else 1, "depth": inputs}[layer.groups]
        self.conv = conv(
            inputs, outputs, layer.kernel, 1 if keeps else layer.stride, layer.dilation * (layer.kernel // 2),
            layer.dilation, groups, bias=layer.bias,
        )  # fmt: skip
        norms: dict[str, Callable[[], nn.Module]] = {
            "none": nn.Identity,
            "affine": lambda: norm(outputs),
            "plain": lambda: norm(outputs, affine=False),
        }
        self.norm = norms[layer.norm]()
        self.activation = ACTIVATIONS[layer.activation]()
        pools: dict[str, nn.Module] = {
            "max": of_rank("MaxPool", rank)(2, 2, ceil_mode=True),
            "avg": of_rank("AvgPool", rank)(*((3, 2, 1) if rank < 3 else (2, 2)), count_include_pad=layer.bias),
            "norm": norm(outputs),
        }
        self.after = pools.get(layer.structure)
        self.joins = layer.structure == "concat" and layer.stride == 1
        self.channels = outputs + (inputs if self.joins else 0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.structure == "residual":
            return self.activation(y + x)
        if self.structure == "reread":
            return self.activation(y.clone()) + y
        y = self.activation(y)
        if self.structure == "twice":
            return self.activation(self.norm(self.conv(y)))
        if self.structure == "concat" and y.shape[2:] == x.shape[2:] and self.joins:  # at a stride of 1
            return torch.cat([y, x], 1)
        return y if self.after is None else self.after(y)


class ConvNet(nn.Module):
    """The module of a `Net`; attribute names are the layers' numbers."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        channels, blocks = 3, []
        for layer in net.layers:
            blocks.append(Block(layer, channels, net.rank))
            channels = blocks[-1].channels
        self.blocks = nn.ModuleList(blocks)
        pool = of_rank("AdaptiveAvgPool", net.rank)(1)
        self.pool = pool if net.head == "linear" else nn.Identity()
        self.side = of_rank("Conv", net.rank)(3, 3, 1) if net.inputs == 2 else None
        self.hidden = nn.Linear(channels, 6) if net.head == "hidden" else None
        self.linear = (
            nn.Linear(6 if net.head == "hidden" else channels, 5) if net.head not in ("none", "pair") else None
        )

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        if self.side is not None:
            x = self.side(x) + self.side(other)
        for block in self.blocks:
            x = block(x)
        if self.net.head == "pair":
            return x, x.mean(tuple(range(2, x.dim())))
        if self.linear is None:
            return x
        x = torch.flatten(self.pool(x), 1) if self.net.head == "linear" else x.mean(tuple(range(2, x.dim())))
        if self.hidden is not None:
            x = F.relu(self.hidden(x))
        return self.linear(x)


def build(net: Net) -> nn.Module:
    """The net's module in evaluation mode, its batch-norm statistics those of a few random batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(net.seed)
        model = ConvNet(net)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                module.momentum = None
                if module.affine:
                    nn.init.uniform_(module.weight, -1.5, 1.5)
                    nn.init.uniform_(module.bias, -0.5, 0.5)
        model.train()
        with torch.no_grad():
            for step in range(2):
                model(*example(net, 16, seed=step))
    return model.eval()


def example(net: Net, size: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    """A batch of ``size`` normal inputs, one tensor for each argument."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 3, *{1: (9,), 2: (9, 8), 3: (13, 12, 13)}[net.rank])
    return tuple(torch.randn(shape, generator=generator) for _ in range(net.inputs))


def layers(activations: tuple[str, ...] = tuple(ACTIVATIONS)) -> st.SearchStrategy[Layer]:
    """One layer, its activation one of ``activations``."""
    return st.builds(
        Layer,
        structure=st.sampled_from(["plain", "plain", "residual", "concat", "twice", "reread", "max", "avg", "norm"]),
        channels=st.sampled_from([4, 6, 8]),
        kernel=st.sampled_from([1, 3]),
        stride=st.sampled_from([1, 1, 2]),
        groups=st.sampled_from(["one", "one", "two", "depth"]),
        dilation=st.sampled_from([1, 1, 2]),
        bias=st.booleans(),
        norm=st.sampled_from(["affine", "affine", "none", "plain"]),
        activation=st.sampled_from(activations),
    )


def nets(activations: tuple[str, ...] = tuple(ACTIVATIONS), most: int = 4) -> st.SearchStrategy[Net]:
    """A net of one to ``most`` layers, at most two of volumes: torch's pools of these take no window beyond them."""
    drawn = st.builds(
        Net,
        layers=st.lists(layers(activations), min_size=1, max_size=most).map(tuple),
        head=st.sampled_from(["linear", "linear", "hidden", "mean", "none", "pair"]),
        rank=st.sampled_from([2, 2, 2, 1, 3]),
        inputs=st.sampled_from([1, 1, 1, 2]),
        seed=st.integers(0, 99),
    )
    return drawn.map(lambda net: _of_volumes(net) if net.rank == 3 else net)


def _of_volumes(net: Net) -> Net:
    """Layers of enough channels for integer kernels, and a linear one behind those that have too few all the same."""
    layers = tuple(replace(layer, channels=16) for layer in net.layers[:2])
    return replace(net, layers=layers, head="mean" if net.head in ("none", "pair") else net.head)
