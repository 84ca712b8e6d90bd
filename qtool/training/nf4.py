"""Frozen weights in 4 bits: bitsandbytes' NF4 below the adapters of QLoRA.

NF4 (arXiv 2305.14314) has 16 levels at the quantiles of a normal distribution, and one float32 scale, the largest
magnitude, for every 64 weights: 4.5 bits a weight. The forward pass widens a layer's weights to the input's dtype,
multiplies and forgets them; the backward pass widens them once more, for the gradient of the input. Nothing
of the layer is trained, so nothing else is needed.

Left out on purpose: quantizing the scales too (0.37 bits a weight less), and kernels that widen within the product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 64


class NF4Linear(nn.Module):
    """A frozen linear layer of which each weight takes 4 bits: …×in to …×out. Neither is stored in a state dict.

    ``transposed`` says that the layer it was made from (transformers' ``Conv1D``) holds in×out weights.
    """

    bias: nn.Parameter | None

    def __init__(self, like: nn.Module, weight: Tensor, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.like, self.dtype, self.transposed = [like], weight.dtype, transposed  # a list: no child module
        self.shape = (weight.shape[1], weight.shape[0]) if transposed else tuple(weight.shape)
        wide = (weight.T if transposed else weight).detach().contiguous()
        packed, scales = torch.ops.bitsandbytes.quantize_4bit(wide, BLOCK, "nf4", torch.uint8)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self.packed, self.scales, self.shape)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def restored(self) -> nn.Module:
        """The layer it was made from, with the weights as NF4 rounded them, in their own dtype."""
        assert isinstance(self.packed, Tensor)
        assert isinstance(self.scales, Tensor)
        wide = _widened(self.packed, self.scales.float(), self.shape, self.dtype)
        layer = self.like[0]
        layer.weight.data = (wide.T if self.transposed else wide).contiguous()
        return layer


class _Product(torch.autograd.Function):
    """x Wᵀ, keeping the 4-bit weights alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return F.linear(x, _widened(packed, scales, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        packed, scales = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ _widened(packed, scales, ctx.shape, gradient.dtype), None, None, None


def quantized(layer: nn.Module) -> NF4Linear:
    """``layer``, linear or transformers' ``Conv1D``, in 4 bits; its own weights are let go of."""
    import bitsandbytes  # noqa: F401  (registers the operators)

    assert isinstance(layer.weight, Tensor)
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    small = NF4Linear(layer, layer.weight, bias, not isinstance(layer, nn.Linear))
    layer.weight.data = layer.weight.data.new_empty(0)  # the parameter itself stays what others know it as
    return small


def _widened(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    assert packed.numel() * 2 >= math.prod(shape)
    wide: Tensor = torch.ops.bitsandbytes.dequantize_4bit(packed, scales.float(), BLOCK, "nf4", list(shape), dtype)
    return wide
