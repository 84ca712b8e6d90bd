"""Integer kernels: what ONNX Runtime's CPU provider computes for each fused QDQ group, bit for bit.

ONNX Runtime replaces *DequantizeLinear → operator → QuantizeLinear* by one integer operator. Each function here is
one of them, written from its arithmetic (the runtime's sources, MLAS, checked output by output against 1.31.1 on an
x86 CPU with AVX512-VNNI). With ``ŝ = float32`` operations in the order written, ``R`` round half to even:

====================  =================================================================================
Conv                  ``R(clamp(float32(Σ(x−zx)(w−zw) + bias) · (sx·sw/sy))) + zy``, one ``sw`` per channel
Gemm                  the same with ``alpha·sa·sb / sy``; with no quantiser behind it ``float32(acc)·(alpha·sa·sb)``
MatMul                the same with ``sa·sb / sy``, or ``float32(acc)·(sa·sb)``
GlobalAveragePool     the same on ``Σ(x−zx)`` with ``sx / (sy·n)``
Add                   ``clamp(R(fma(a, ra, fma(b, rb, c))))``; ``ra = sa/sy``, ``rb = sb/sy``,
                      ``c = zy − fma(ra, za, rb·zb)``; a and b change places where a is broadcast along the last axis
Mul                   ``clamp(R((a−za)(b−zb) · (sa·sb/sy) + zy))``: a product, then a sum
AveragePool           float32 sum of dequantised values in row order, ``/ count``, ``clamp(R(mean/sy + zy))``
Sigmoid, LeakyRelu    a table of 256: dequantise, the float32 function, quantise
Concat                such a table for every input whose meaning is not the output's
Softmax               a table of ``exp`` shifted by the row's maximum, float32 sums from left to right
MaxPool and moves     the integers themselves
====================  =================================================================================

Every kernel takes ``(inputs, attributes, output)``: :class:`Quantized` inputs (``None`` for one left out), the ONNX
attributes, and the meaning of the output (``None`` where the operator's output stays float32). ``KERNELS`` holds them
under the ONNX operator's name. A ReLU or Clip behind an operator needs nothing: the output's range is its clamp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qtool.exporting.reference.integer_arithmetic import (
    Affine,
    Quantized,
    dequantize,
    exact_conv,
    exact_matmul,
    quantize,
    requantize,
    saturate,
    with_bias,
)
from qtool.graphs.polynomials import fused_multiply_add, logistic

Attributes = Mapping[str, Any]
T = TypeVar("T")
Kernel = Callable[[Sequence[Quantized | None], Attributes, Affine | None], Quantized | Tensor]


def conv(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearConv. Inputs x (N×C×spatial), w (M×C/groups×kernel, per tensor or per channel), int32 bias or ``None``."""
    x, w, bias = required(inputs[0]), required(inputs[1]), inputs[2] if len(inputs) > 2 else None
    output = required(output)
    kernel = w.values.shape[2:]
    strides, dilations = spatial(attributes, "strides", len(kernel)), spatial(attributes, "dilations", len(kernel))
    cut = w.cut(x.largest)
    acc = exact_conv(
        x.steps,
        w.steps,
        cut.pieces,
        strides=strides,
        pads=padding(attributes, x.values.shape[2:], kernel, strides, dilations),
        dilations=dilations,
        groups=int(attributes.get("group", 1)),
    )
    columns = (-1, *[1] * len(kernel))
    multiplier = (x.affine.scale * w.affine.scale / output.scale).reshape(columns).to(acc.device)
    acc = with_bias(acc, None if bias is None else bias.values.reshape(columns), cut.bound)
    return requantize(acc, multiplier, output)


def gemm(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized | Tensor:
    """QGemm. Inputs a (M×K), b (K×N, or N×K with ``transB``; one scale, or one per column), int32 bias."""
    a, b, bias = required(inputs[0]), required(inputs[1]), inputs[2] if len(inputs) > 2 else None
    transposed = bool(attributes.get("transB", 0))
    cut = b.cut(a.largest, outputs=0 if transposed else 1)
    left = a.steps.T if attributes.get("transA", 0) else a.steps
    right = b.steps.T if transposed else b.steps
    acc = with_bias(exact_matmul(left, right, cut.pieces), None if bias is None else bias.values, cut.bound)
    alpha = torch.tensor(attributes.get("alpha", 1.0), dtype=torch.float32)
    return scaled(acc, alpha * a.affine.scale * b.affine.scale, output)


def matmul(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized | Tensor:
    """QLinearMatMul, or MatMulIntegerToFloat where no quantiser follows. Stacked operands broadcast."""
    a, b = required(inputs[0]), required(inputs[1])
    cut = b.cut(a.largest, outputs=-1)
    acc = with_bias(exact_matmul(a.steps, b.steps, cut.pieces), None, cut.bound)
    return scaled(acc, a.affine.scale * b.affine.scale, output)


def scaled(acc: Tensor, multiplier: Tensor, output: Affine | None) -> Quantized | Tensor:
    """Sums to the output's integers, or to float32 where there is no output quantiser."""
    if output is None:
        return acc.to(torch.float32) * multiplier.to(acc.device)
    return requantize(acc, (multiplier / output.scale).to(acc.device), output)


def add(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearAdd with broadcasting."""
    a, b = required(inputs[0]), required(inputs[1])
    if repeats_along_rows(a.values.shape, b.values.shape):
        a, b = b, a
    return for_pairs(weighted_sum, a, b, required(output))


def weighted_sum(a: Quantized, b: Quantized, output: Affine) -> Tensor:
    """``fma(a, ra, fma(b, rb, c))``: ``a`` and ``b`` in steps of the output."""
    ratio_a, ratio_b = (a.affine.scale / output.scale).reshape(1), (b.affine.scale / output.scale).reshape(1)
    zero_a, zero_b, zero = (q.zero_point.to(torch.float32).reshape(1) for q in (a.affine, b.affine, output))
    constant = zero - fused_multiply_add(ratio_a, zero_a, ratio_b * zero_b)
    inner = fused_multiply_add(b.values.to(torch.float32), ratio_b.to(b.values.device), constant.to(b.values.device))
    return fused_multiply_add(a.values.to(torch.float32), ratio_a.to(a.values.device), inner)


def multiply(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearMul with broadcasting."""
    return for_pairs(scaled_product, required(inputs[0]), required(inputs[1]), required(output))


def scaled_product(a: Quantized, b: Quantized, output: Affine) -> Tensor:
    """``(a − za)(b − zb)``, exact, times the combined scale, plus the zero point."""
    ratio = (a.affine.scale * b.affine.scale / output.scale).to(a.values.device)
    return a.steps * b.steps * ratio + output.zero_point.to(a.values.device)


def for_pairs(
    function: Callable[[Quantized, Quantized, Affine], Tensor], a: Quantized, b: Quantized, output: Affine
) -> Quantized:
    """``function`` of two 8-bit tensors, rounded and clamped: by a table of all pairs where there are more outputs."""
    shape = np.broadcast_shapes(tuple(a.values.shape), tuple(b.values.shape))
    if math.prod(shape) <= 2**16:
        return saturate(function(a, b, output), output)
    rows, columns = a.with_values(every_integer(a)[:, None]), b.with_values(every_integer(b)[None, :])
    table = saturate(function(rows, columns, output), output).values.flatten()
    index = (a.values.to(torch.int32) - a.affine.low) * 256 + (b.values.to(torch.int32) - b.affine.low)
    return Quantized(table.index_select(0, index.flatten()).reshape(shape), output)


def every_integer(x: Quantized) -> Tensor:
    """All 256 integers that ``x`` can hold, in order."""
    return torch.arange(x.affine.low, x.affine.high + 1, dtype=torch.int32, device=x.values.device).to(x.affine.dtype)


def repeats_along_rows(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether ``first`` has one value along the last axis that is not 1 in both: operands then change places."""
    rank = max(len(first), len(second))
    pairs = zip([1] * (rank - len(first)) + list(first), [1] * (rank - len(second)) + list(second), strict=True)
    return next((m == 1 for m, n in reversed(list(pairs)) if (m, n) != (1, 1)), True)


def global_average_pool(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearGlobalAveragePool: N×C×spatial to N×C×1…"""
    x, output = required(inputs[0]), required(output)
    axes = list(range(2, x.values.ndim))
    size = torch.tensor(float(math.prod(x.values.shape[2:])))
    acc = x.steps.sum(axes, keepdim=True, dtype=torch.float64)
    return requantize(acc.to(torch.int32), (x.affine.scale / (output.scale * size)).to(acc.device), output)


def average_pool(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearAveragePool; a window over the whole of an unpadded image is a global average pool, as in the runtime."""
    x, output = required(inputs[0]), required(output)
    rank = x.values.ndim - 2
    if list(attributes["kernel_shape"]) == list(x.values.shape[2:]) and not any(attributes.get("pads", [0])):
        return global_average_pool(inputs, attributes, output)
    means = window_means(dequantize(x), attributes)
    scale, zero_point = output.along(means)
    assert means.ndim == rank + 2
    return saturate(means / scale + zero_point, output)


def window_means(x: Tensor, attributes: Attributes) -> Tensor:
    """The mean of every pooling window of floats, added up in row order.

    With ``count_include_pad`` all of the kernel counts, what ``ceil_mode`` adds as well: so does QLinearAveragePool.
    """
    ones = x.new_ones(x.shape[2:])[None, None]
    places = zip(windows(x, attributes, 0.0), windows(ones, attributes, 0.0), strict=True)
    total, count = next(places)
    for values, inside in places:
        total, count = total + values, count + inside
    if attributes.get("count_include_pad", 0):
        count = torch.full_like(count, math.prod(attributes["kernel_shape"]))
    return total / count


def max_pool(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """MaxPool on the integers: the order of the integers is the order of the numbers."""
    x = required(inputs[0])
    return x.with_values(largest_in_windows(x.values, attributes))


def largest_in_windows(x: Tensor, attributes: Attributes) -> Tensor:
    """The largest value of every pooling window, of integers or floats."""
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    result, *others = windows(x, attributes, lowest)
    for values in others:
        result = torch.maximum(result, values)
    return result


def places_of_largest(x: Tensor, attributes: Attributes) -> Tensor:
    """Where in ``x``, flattened, the first of the largest values of every pooling window is."""
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    everywhere = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    pairs = zip(windows(x, attributes, lowest), windows(everywhere, attributes, -1), strict=True)
    largest, places = next(pairs)
    for values, found in pairs:
        larger = (values > largest) | ((places < 0) & (found >= 0))  # padding is nowhere, however low the values
        largest, places = torch.where(larger, values, largest), torch.where(larger, found, places)
    return places


def windows(x: Tensor, attributes: Attributes, fill: float) -> Iterator[Tensor]:
    """For each place in a pooling kernel, in row order, the values that all windows hold there."""
    kernel, size = list(attributes["kernel_shape"]), list(x.shape[2:])
    rank = len(kernel)
    strides, dilations = spatial(attributes, "strides", rank), spatial(attributes, "dilations", rank)
    pads = padding(attributes, size, kernel, strides, dilations)
    counts = [
        pooled_size(size[i], pads[i], pads[i + rank], kernel[i], strides[i], dilations[i], attributes)
        for i in range(rank)
    ]
    ends = [(counts[i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - pads[i] - size[i] for i in range(rank)]
    flat = [pad for i in reversed(range(rank)) for pad in (pads[i], max(ends[i], 0))]
    x = torch.nn.functional.pad(x, flat, value=fill)
    for place in range(math.prod(kernel)):
        index: list[slice] = [slice(None), slice(None)]
        for i in range(rank):
            start = place // math.prod(kernel[i + 1 :]) % kernel[i] * dilations[i]
            index.append(slice(start, start + (counts[i] - 1) * strides[i] + 1, strides[i]))
        yield x[tuple(index)]


def pooled_size(
    size: int, begin: int, end: int, kernel: int, stride: int, dilation: int, attributes: Attributes
) -> int:
    """How many windows fit along one axis; with ``ceil_mode`` none that begins beyond input and left padding."""
    room = size + begin + end - dilation * (kernel - 1) - 1
    if not attributes.get("ceil_mode", 0):
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + begin else count


def spatial(attributes: Attributes, name: str, rank: int) -> list[int]:
    """An attribute with one number per spatial axis, 1 where it is left out."""
    return list(attributes.get(name) or [1] * rank)


def padding(
    attributes: Attributes, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """ONNX ``pads`` (all begins, all ends), worked out where ``auto_pad`` asks for it."""
    rank, mode = len(kernel), attributes.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return list(attributes.get("pads") or [0] * 2 * rank) if mode == "NOTSET" else [0] * 2 * rank
    totals = [
        max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True)
    ]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return small + large if mode == "SAME_UPPER" else large + small


def by_table(function: Callable[[Tensor, Attributes], Tensor]) -> Kernel:
    """A kernel that looks every integer up in the 256 outputs of ``function``."""

    def kernel(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
        x = required(inputs[0])
        return look_up(x, lambda real: function(real, attributes), required(output))

    return kernel


def look_up(x: Quantized, function: Callable[[Tensor], Tensor], output: Affine) -> Quantized:
    """Dequantise, ``function``, quantise, for every integer of the type once, then for ``x``."""
    table = quantize(function(dequantize(x.with_values(every_integer(x)))), output).values
    index = (x.values.to(torch.int32) - x.affine.low).flatten()
    return Quantized(table.index_select(0, index).reshape(x.values.shape), output)


def leaky_relu(x: Tensor, attributes: Attributes) -> Tensor:
    """``x`` where it is not negative, ``alpha·x`` elsewhere."""
    return torch.where(x >= 0, x, x * torch.tensor(attributes.get("alpha", 0.01), dtype=torch.float32))


def concat(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearConcat: an input with the output's meaning is copied, any other goes through a table."""
    output = required(output)
    parts = [required(x) for x in inputs]
    moved = [x.values if x.affine.same_as(output) else look_up(x, lambda real: real, output).values for x in parts]
    return Quantized(torch.cat(moved, int(attributes["axis"])), output)


def softmax(inputs: Sequence[Quantized | None], attributes: Attributes, output: Affine | None) -> Quantized:
    """QLinearSoftmax along ``axis``; ``1/sy`` is rounded down to a whole number, as the runtime does it."""
    x, output = required(inputs[0]), required(output)
    rows = x.values.to(torch.int64).movedim(int(attributes.get("axis", -1)), -1)
    length = rows.shape[-1]
    table = exponentials(x.affine.scale.reshape(-1)[:1].double().item(), length).to(rows.device)
    terms = table[rows - rows.amax(-1, keepdim=True) + 255]
    total = terms[..., 0]
    for i in range(1, length):
        total = total + terms[..., i]
    steps = torch.floor(1.0 / output.scale.reshape(-1)[:1]).to(rows.device)
    scaled_terms = torch.round(terms * steps / total[..., None]) + output.zero_point.to(rows.device)
    values = scaled_terms.clamp(max=output.high).to(output.dtype)
    return Quantized(values.movedim(-1, int(attributes.get("axis", -1))).contiguous(), output)


def exponentials(scale: float, length: int) -> Tensor:
    """``exp`` of −255…0 steps, shifted so far up that ``length`` of them still add up in float32."""
    room = math.log(torch.finfo(torch.float32).max / length)
    shift = max(0.0, float(torch.tensor(room, dtype=torch.float32)) - 5) / scale
    return torch.tensor([math.exp((i - 255 + shift) * scale) for i in range(256)], dtype=torch.float32)


def required(value: T | None) -> T:
    """``value``, which this operator cannot do without."""
    assert value is not None
    return value


KERNELS: dict[str, Kernel] = {
    "Add": add,
    "AveragePool": average_pool,
    "Concat": concat,
    "Conv": conv,
    "Gemm": gemm,
    "GlobalAveragePool": global_average_pool,
    "LeakyRelu": by_table(leaky_relu),
    "MatMul": matmul,
    "MaxPool": max_pool,
    "Mul": multiply,
    "Sigmoid": by_table(lambda real, _: logistic(real)),
    "Softmax": softmax,
}
