"""The arithmetic under every integer kernel: exact sums, and float32 steps rounded where the runtime rounds them.

An integer tensor stands for real numbers: ``real = scale · (q − zero_point)``. A runtime multiplies and adds the
integers exactly, and only then returns to eight bits through a few float32 operations. Those few decide every last
bit, so each is written out here once:

requantise   ``clamp(float32(acc) · m, qmin − z, qmax − z)``, rounded half to even, plus ``z``. ``float32(acc)`` rounds
             half to even above 2^24; ``m`` is one float32; clamping comes before rounding, the zero point after.
quantise     ``x / scale`` (a division, not a product with 1/scale), then as above.
dequantise   ``float32(q − z) · scale``.

Sums of products are integers, so any order of summation gives the same result as long as every partial sum is exact:
in float32 below 2^24, in float64 below 2^53. :func:`exact_conv` and :func:`exact_matmul` bound the partial sums by
``max |x| · Σ |w|`` and cut the reduction into pieces that stay below 2^24, which keeps the fast float32 convolution.
Integers up to 256 are exact in bfloat16 and TF32 too, so a lowered matmul precision changes nothing.

Left out on purpose: NaN and infinity (calibrated tensors hold neither), types other than 8 and 32 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT_FLOAT32 = 2**24


@dataclass(frozen=True)
class Affine:
    """What an integer means: ``real = scale · (q − zero_point)``, with one scale, or one per index of ``axis``."""

    scale: Tensor
    zero_point: Tensor
    dtype: torch.dtype = torch.uint8
    axis: int | None = None

    @classmethod
    def of(cls, scale: float | Tensor, zero_point: int | Tensor = 0, dtype: torch.dtype = torch.uint8) -> Affine:
        """A per-tensor meaning from plain numbers; ``scale`` is rounded to float32."""
        return cls(torch.as_tensor(scale, dtype=torch.float32), torch.as_tensor(zero_point, dtype=torch.int32), dtype)

    @property
    def low(self) -> int:
        """The smallest integer of ``dtype``."""
        return torch.iinfo(self.dtype).min

    @property
    def high(self) -> int:
        """The largest integer of ``dtype``."""
        return torch.iinfo(self.dtype).max

    def same_as(self, other: Affine) -> bool:
        """Whether both give every integer the same meaning, bit for bit."""
        return (
            self.dtype == other.dtype
            and torch.equal(self.scale.cpu(), other.scale.cpu())
            and torch.equal(self.zero_point.cpu(), other.zero_point.cpu())
        )

    def along(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point on ``tensor``'s device, shaped to broadcast against it along ``axis``."""
        scale, zero_point = self.scale.to(tensor.device), self.zero_point.to(tensor.device)
        if self.axis is None or scale.numel() == 1:
            return scale.reshape(-1)[:1], zero_point.reshape(-1)[:1]
        shape = [1] * tensor.ndim
        shape[self.axis] = -1
        return scale.reshape(shape), zero_point.reshape(shape)


@dataclass(frozen=True)
class Quantized:
    """Integers and their meaning: a real tensor that has not been dequantised yet."""

    values: Tensor
    affine: Affine
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def with_values(self, values: Tensor) -> Quantized:
        """The same meaning for other integers (after a reshape, a pooling maximum …)."""
        return Quantized(values, self.affine)

    @cached_property
    def steps(self) -> Tensor:
        """``q − zero_point`` in float32: exact, at most 255 in magnitude for eight bits. Never written to."""
        _, zero_point = self.affine.along(self.values)
        steps = self.values.to(torch.float32)
        return steps.sub_(zero_point) if bool(zero_point.count_nonzero()) else steps

    @property
    def largest(self) -> int:
        """The largest magnitude that ``q − zero_point`` can take, by its type."""
        zero_point = self.affine.zero_point
        return int(max(self.affine.high - int(zero_point.min()), int(zero_point.max()) - self.affine.low))

    def cut(self, largest: int, outputs: int = 0) -> Cut:
        """How to sum ``x · self`` exactly for ``|x| ≤ largest``, remembered; ``outputs`` is self's axis of outputs."""
        key = (largest, outputs)
        if key not in self.known:
            weight = self.steps.abs().movedim(outputs, 0)
            across = weight.flatten(2).sum(2) if outputs == 0 and weight.ndim > 2 else weight
            self.known[key] = cut(across if across.ndim == 2 else across.flatten(1, -2).amax(1), largest)
        return self.known[key]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cut:
    """``pieces`` of a reduction that float32 adds exactly (none: use float64); ``bound`` on the whole sum."""

    pieces: tuple[slice, ...]
    bound: float


def dequantize(x: Quantized) -> Tensor:
    """``float32(q − z) · scale``: one rounding (two for 32-bit integers above 2^24)."""
    scale, zero_point = x.affine.along(x.values)
    return (x.values.to(torch.int32) - zero_point.to(torch.int32)).to(torch.float32) * scale


def quantize(x: Tensor, affine: Affine) -> Quantized:
    """``clamp(x / scale)`` rounded half to even, plus the zero point, as MLAS does it (the division is a division)."""
    scale, zero_point = affine.along(x)
    return Quantized(_round_into(x / scale, zero_point, affine), affine)


def requantize(acc: Tensor, multiplier: Tensor, affine: Affine) -> Quantized:
    """Sums to eight bits: ``clamp(float32(acc) · multiplier)`` rounded half to even, plus the zero point.

    ``acc``: int32, or float32 that holds integers exactly (overwritten). ``multiplier``: float32, broadcastable.
    """
    _, zero_point = affine.along(acc)
    return Quantized(_round_into(acc.to(torch.float32).mul_(multiplier), zero_point, affine), affine)


def _round_into(x: Tensor, zero_point: Tensor, affine: Affine) -> Tensor:
    """Clamp, round, add the zero point; overwrites ``x``, which the callers above have just made."""
    if zero_point.numel() > 1:
        low, high = (end - zero_point.to(torch.float32) for end in (affine.low, affine.high))
        return torch.maximum(x, low).minimum(high).round_().add_(zero_point).to(affine.dtype)
    zero = int(zero_point)
    x = x.clamp_(float(affine.low - zero), float(affine.high - zero)).round_()
    return (x.add_(zero) if zero else x).to(affine.dtype)


def saturate(x: Tensor, affine: Affine) -> Quantized:
    """Round half to even with the zero point already inside ``x``, then clamp: the order of the elementwise kernels."""
    return Quantized(torch.round(x).clamp(affine.low, affine.high).to(affine.dtype), affine)


def with_bias(acc: Tensor, bias: Tensor | None, bound: float) -> Tensor:
    """``acc + bias``: in float32 where ``bound`` on ``|acc|`` keeps it exact, else int32 that wraps like the hardware.

    ``bias``: int32, broadcastable, or ``None``. Overwrites ``acc``.
    """
    heaviest = 0 if bias is None or not bias.numel() else int(bias.to(torch.int64).abs().max())
    if acc.dtype == torch.float32 and bound + heaviest < EXACT_FLOAT32:
        return acc if bias is None else acc.add_(bias.to(acc.device, torch.float32))
    total = acc.to(torch.int64) if bias is None else acc.to(torch.int64) + bias.to(acc.device, torch.int64)
    return total.to(torch.int32)


def exact_conv(
    x: Tensor,
    weight: Tensor,
    pieces: Sequence[slice],
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolution of integers held in float32, exactly: N×C×spatial with M×C/groups×kernel.

    ``pieces`` (of the input channels) come from :meth:`Quantized.cut`. ``pads`` are ONNX's (all begins, then all ends)
    and are filled with 0. The result holds integers in float32, or in float64 where float32 could not.
    """
    rank = weight.ndim - 2
    x = F.pad(x, [pad for axis in reversed(range(rank)) for pad in (pads[axis], pads[axis + rank])]) if any(pads) else x
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]

    def run(x: Tensor, weight: Tensor) -> Tensor:
        with torch.backends.nnpack.flags(enabled=False):  # NNPACK's Winograd transforms are not exact on integers
            return conv(x, weight, None, list(strides), 0, list(dilations), groups)

    if x.device.type != "cpu":  # cuDNN may choose Winograd or FFT, which float64 leaves exact after rounding
        return run(x.double(), weight.double()).round()
    if len(pieces) == 1:
        return run(x, weight)
    if groups > 1 or not pieces:
        return run(x.double(), weight.double())
    return sum_exactly(run(x[:, piece], weight[:, piece]) for piece in pieces)


def exact_matmul(a: Tensor, b: Tensor, pieces: Sequence[slice]) -> Tensor:
    """``a @ b`` of integers held in float32, exactly, in float32 or float64; ``pieces`` cut the reduction."""
    if len(pieces) == 1:
        return a @ b
    if not pieces or a.device.type != "cpu":
        return a.double() @ b.double()
    return sum_exactly(a[..., piece] @ b[..., piece, :] for piece in pieces)


def cut(magnitudes: Tensor, largest: int, most: int = 8) -> Cut:
    """Cuts of a reduction whose partial sums all stay below 2^24, so that float32 adds them exactly in any order.

    ``magnitudes``: outputs × reduction, ``|weight|`` summed over whatever is never cut. Where more than ``most`` pieces
    would be needed there are none: float64 is cheaper.
    """
    size = magnitudes.shape[1]
    bound = float(magnitudes.sum(1, dtype=torch.float64).max()) * largest
    if bound < EXACT_FLOAT32:
        return Cut((slice(0, size),), bound)
    sums = F.pad(magnitudes.double().cumsum(1), (1, 0))
    for count in range(2, min(most, size) + 1):
        edges = torch.linspace(0, size, count + 1).round().long()
        if float(sums[:, edges.to(sums.device)].diff(dim=1).max()) * largest < EXACT_FLOAT32:
            return Cut(tuple(slice(int(i), int(j)) for i, j in itertools.pairwise(edges)), bound)
    return Cut((), bound)


def sum_exactly(parts: Iterable[Tensor]) -> Tensor:
    """The sum of integer tensors in float64."""
    first, *others = parts
    total = first.double()
    for part in others:
        total += part
    return total
