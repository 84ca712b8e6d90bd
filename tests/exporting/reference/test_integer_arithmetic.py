"""Exact sums and single roundings, against integers of Python and numpy's 64-bit arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.exporting.reference.integer_arithmetic import (
    EXACT_FLOAT32,
    Affine,
    Quantized,
    cut,
    dequantize,
    exact_conv,
    exact_matmul,
    quantize,
    requantize,
    with_bias,
)
from qtool.graphs.polynomials import fused_multiply_add

floats = st.floats(-(2.0**40), 2.0**40, width=32, allow_nan=False, allow_subnormal=False)


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number, ties to even, found among neighbours."""
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    gaps = [abs(Fraction(float(c)) - exact) for c in candidates]
    best = [c for c, gap in zip(candidates, gaps, strict=True) if gap == min(gaps)]
    return best[0] if len(best) == 1 else next(c for c in best if not c.view(np.int32) & 1)


@given(floats, floats, floats)
@settings(max_examples=300)
def test_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    result = fused_multiply_add(*(torch.tensor([v], dtype=torch.float32) for v in (a, b, c)))
    assert result.numpy()[0] == rounded(Fraction(a) * Fraction(b) + Fraction(c))


def test_fused_multiply_add_where_float64_would_round_twice() -> None:
    # 1 + 2^-24 is half way between two float32; a term below float64's last bit decides, and float64 alone loses it
    a, b, c = torch.tensor([1 + 2.0**-23]), torch.tensor([2.0**-24 * (1 + 2.0**-23)]), torch.tensor([1.0])
    exact = Fraction(float(a)) * Fraction(float(b)) + 1
    assert fused_multiply_add(a, b, c).numpy()[0] == rounded(exact)
    tiny, odd = torch.tensor([2.0**-40]), torch.tensor([2.0**12 + 1])
    assert fused_multiply_add(odd, odd, -tiny).item() == 2**24 + 2**13
    assert fused_multiply_add(odd, odd, tiny).item() == 2**24 + 2**13 + 2


def test_fused_multiply_add_rounds_once_between_subnormal_numbers() -> None:
    """Midway between two of them is told by other bits of float64 than between larger numbers."""
    a, b = torch.tensor([2.0**-75 * (1 + 2.0**-20)]), torch.tensor([2.0**-75 * (1 - 2.0**-20)])
    c = torch.tensor([2.0**-127 + 2.0**-149])
    assert fused_multiply_add(a, b, c).item() == c.item()


@pytest.mark.parametrize(("groups", "channels", "outputs"), [(1, 600, 5), (1, 8, 6), (8, 8, 8), (2, 8, 4)])
def test_convolution_is_exact_whatever_the_sums(groups: int, channels: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randint(-255, 256, (2, channels, 7, 6), generator=generator)
    weight = torch.full((outputs, channels // groups, 3, 3), 127)
    weight[:, ::2] -= torch.randint(0, 3, weight[:, ::2].shape, generator=generator)
    w = Quantized(weight.to(torch.int8), Affine.of(1.0, 0, torch.int8))
    result = exact_conv(
        x.float(), w.steps, w.cut(255).pieces, strides=[2, 1], pads=[1, 0, 2, 1], dilations=[1, 2], groups=groups
    )
    padded = torch.nn.functional.pad(x.double(), (0, 1, 1, 2))
    expected = torch.nn.functional.conv2d(padded, weight.double(), None, (2, 1), 0, (1, 2), groups)
    assert torch.equal(result.double(), expected)


def test_long_sums_are_cut_and_longer_ones_leave_float32() -> None:
    assert len(cut(torch.full((3, 500), 127.0), 255).pieces) == 1
    pieces = cut(torch.full((3, 2000), 127.0), 255)
    assert len(pieces.pieces) > 1
    assert pieces.bound > EXACT_FLOAT32
    assert [p.start for p in pieces.pieces[1:]] == [p.stop for p in pieces.pieces[:-1]]
    assert all((p.stop - p.start) * 127 * 255 < EXACT_FLOAT32 for p in pieces.pieces)
    assert cut(torch.full((3, 20000), 127.0), 255).pieces == ()


@pytest.mark.parametrize("length", [10, 3000, 30000])
def test_matrix_product_is_exact(length: int) -> None:
    a = torch.full((3, length), 255.0)
    a[1, ::3] = 254
    b = Quantized(torch.full((length, 2), -127, dtype=torch.int8), Affine.of(1.0, 0, torch.int8))
    result = exact_matmul(a, b.steps, b.cut(255, outputs=1).pieces)
    assert torch.equal(result.to(torch.int64), a.to(torch.int64) @ b.values.to(torch.int64))


def test_bias_wraps_like_int32() -> None:
    acc, bias = torch.tensor([2.0**23]), torch.tensor([2**31 - 1], dtype=torch.int32)
    assert with_bias(acc, bias, 2.0**23).tolist() == [2**23 - 2**31 - 1]
    assert with_bias(torch.tensor([5.0]), torch.tensor([-7], dtype=torch.int32), 5.0).tolist() == [-2]


def test_rounding_is_half_to_even_and_the_zero_point_comes_last() -> None:
    affine = Affine.of(1.0, 3)
    x = torch.tensor([0.5, 1.5, -2.5, -3.5, 400.0, -400.0])
    assert quantize(x, affine).values.tolist() == [3, 5, 1, 0, 255, 0]
    assert requantize(torch.tensor([5, 7], dtype=torch.int32), torch.tensor([0.5]), affine).values.tolist() == [5, 7]


def test_dequantize_multiplies_the_difference_once() -> None:
    affine = Affine(torch.tensor([0.1, 0.2]), torch.tensor([1, 2], dtype=torch.int32), torch.uint8, 1)
    x = Quantized(torch.tensor([[0, 255], [7, 2]], dtype=torch.uint8), affine)
    expected = np.array([[-1, 253], [6, 0]], np.float32) * np.array([0.1, 0.2], np.float32)
    assert np.array_equal(dequantize(x).numpy(), expected)


def test_division_not_multiplication_by_the_reciprocal() -> None:
    scale = np.float32(0.0123)
    x = (np.arange(-3000, 3000, dtype=np.float32) * np.float32(0.5)) * scale
    got = quantize(torch.from_numpy(x), Affine.of(float(scale), 128)).values.numpy()
    expected = (np.rint(np.clip(x / scale, -128, 127)) + 128).astype(np.uint8)
    assert np.array_equal(got, expected)
