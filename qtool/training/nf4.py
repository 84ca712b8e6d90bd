"""Frozen weights in 4 bits: bitsandbytes' NF4 below the adapters of QLoRA.

NF4 (arXiv 2305.14314) has 16 levels at the quantiles of a normal distribution, and one scale, the largest magnitude,
for every 64 weights. Scales are quantized too, as the paper's section 3 has it: less their mean, as 8-bit floats (e4m3)
with one float32 scale for every 256, which is 4 + 8/64 + 32/(64·256) = 4.13 bits a weight; with float32 scales it would
be 4.5. The forward pass widens a layer's weights to the input's dtype, multiplies and forgets them; the backward pass
widens them once more, for the gradient of the input. Nothing of the layer is trained, so nothing else is needed.

Sharded over several processes, codes of weights and of scales are cut anywhere, as the bytes that they are, and are put
together again before a block runs, like other weights; the layer then finds them as one process does.

Left out on purpose: kernels that widen within the product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.models.materialise import MadeFrom, rows_before
from qtool.system import processes
from qtool.system.imports import imported

BLOCK = 64
SCALES = 256
"""Scales that share a scale."""
CUT = ("packed", "codes")
"""What is a frozen parameter of a layer, so that processes can each keep a part of it. The rest is next to nothing."""


class Scales(NamedTuple):
    """The scales of a weight's n blocks: codes (n, uint8, the bits of e4m3), steps (⌈n/256⌉, float32), their mean."""

    codes: Tensor
    steps: Tensor
    mean: Tensor


class NF4Linear(MadeFrom):
    """A frozen linear layer of which each weight takes 4 bits: …×in to …×out. Neither is stored in a state dict.

    ``transposed`` says that the layer it was made from (transformers' ``Conv1D``) holds in×out weights.
    """

    bias: nn.Parameter | None

    def __init__(self, like: nn.Module, weight: Tensor, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.origin, self.dtype, self.transposed = [like], weight.dtype, transposed  # a list: no child module
        self.shape = (weight.shape[1], weight.shape[0]) if transposed else tuple(weight.shape)
        for name, part in self._parts(weight).items():
            if name in CUT:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))
            else:
                self.register_buffer(name, part, persistent=False)
        self.bias = bias

    def _parts(self, weight: Tensor) -> dict[str, Tensor]:
        wide = (weight.T if self.transposed else weight).detach().contiguous()
        packed, scales = torch.ops.bitsandbytes.quantize_4bit(wide, BLOCK, "nf4", torch.uint8)
        return {"packed": packed, **narrowed(scales.float())._asdict()}

    def take(self, weight: Tensor) -> None:
        """Sets what it holds, or this process's part of it, from the whole weight of the layer it was made from."""
        self.dtype = weight.dtype
        for name, part in self._parts(weight).items():
            if name not in CUT:
                self.register_buffer(name, part, persistent=False)
                continue
            there = torch.empty_like(self.get_parameter(name), device=part.device)
            own = processes.local(there)
            own.copy_(part[(first := rows_before(there)) : first + len(own)])
            self._parameters[name] = nn.Parameter(there, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self.shape, self.packed, *self.scales)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def scales(self) -> Scales:
        return Scales(*(getattr(self, name) for name in Scales._fields))

    def restored(self) -> Any:
        """The layer it was made from, with the weights as NF4 rounded them, in their own dtype."""
        wide = _widened(self.get_parameter("packed"), self.scales, self.shape, self.dtype)
        layer: Any = self.origin[0]
        weight = (wide.T if self.transposed else wide).contiguous()
        if weight.is_meta != layer.weight.is_meta:  # of a sharded model, whose weights are with the first process
            layer.weight = nn.Parameter(weight)
        layer.weight.data, layer.bias = weight, self.bias
        return layer


class _Product(torch.autograd.Function):
    """x Wᵀ, keeping the 4-bit weights alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], packed: Tensor, *scales: Tensor) -> Tensor:
        ctx.save_for_backward(packed, *scales)
        ctx.shape = shape
        return F.linear(x, _widened(packed, Scales(*scales), shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        packed, *scales = ctx.saved_tensors
        (gradient,) = gradients
        wide = _widened(packed, Scales(*scales), ctx.shape, gradient.dtype)
        return gradient @ wide, *(None for _ in range(2 + len(scales)))


def quantized(layer: nn.Module) -> NF4Linear:
    """``layer``, linear or transformers' ``Conv1D``, in 4 bits; its own weights are let go of."""
    imported("bitsandbytes", "--lora-base", "bitsandbytes")  # it registers the operators
    assert isinstance(layer.weight, Tensor)
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    small = NF4Linear(layer, layer.weight, bias, not isinstance(layer, nn.Linear))
    layer.weight.data = layer.weight.data.new_empty(0)  # the parameter itself stays what others know it as
    return small


def _widened(packed: Tensor, scales: Scales, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if packed.is_meta:
        return packed.new_empty(shape, dtype=dtype)
    assert packed.numel() * 2 >= math.prod(shape)
    count = -(-math.prod(shape) // BLOCK)
    wide: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed, widened_scales(scales, count), BLOCK, "nf4", list(shape), dtype
    )
    return wide


def narrowed(scales: Tensor) -> Scales:
    """float32 scales (n) in 8 bits: q = e4m3((s - mean) · 448 / m), m the largest magnitude of s - mean in 256."""
    mean = scales.mean()
    blocks = F.pad(scales - mean, (0, -scales.numel() % SCALES)).view(-1, SCALES)
    steps = blocks.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / steps.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).to(torch.float8_e4m3fn)
    # as bytes: exchanges between processes know no 8-bit floats
    return Scales(codes.view(torch.uint8).flatten()[: scales.numel()].clone(), steps, mean)


def widened_scales(scales: Scales, count: int) -> Tensor:
    """The reverse: float32 (n), to within a sixteenth of what each was from the mean."""
    wide = scales.codes.view(torch.float8_e4m3fn).float()
    return wide.mul_(scales.steps.repeat_interleave(SCALES)[:count]).add_(scales.mean)
