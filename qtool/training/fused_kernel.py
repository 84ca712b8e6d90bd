"""The kernel of :mod:`qtool.training.fused_updates`, which tells what it computes: imported where Triton is.

A program takes ``ROWS`` blocks of 256 neighbours, each a warp's: 8 values a thread, which it reads and writes 16 bytes
of weights at a time; a block's largest moment is found by shuffles within the warp. The books' values are gathered from
the first cache. So are codes: the upper 16 bits of m/s name a cell, a table of 65,536 bytes has the lowest code in it
(of which 24 lines of 128 bytes, one for each power of two, are in use for each sign), and since a cell has one midpoint
at most, one comparison gives the code. A search by halves would gather eight times.

Random numbers are Philox's (Salmon et al., 2011), four of 32 bits from each counter: 16 bits for each of 8 values.
"""

# Triton reads annotations of a kernel, and knows none of these types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)


@triton.jit(do_not_specialize=["seed"], do_not_specialize_on_alignment=["scales1", "scales2"])
def adamw(
    weight, grad, codes1, codes2, scales1, scales2, kept, books, midpoints, cells, num_values, seed,
    beta1, rest1, beta2, rest2, eps, shrink, rate, unbias,
    STOCHASTIC: tl.constexpr, KEEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One step for the ROWS blocks that begin at ROWS·program_id; see ``fused_updates.update`` for the numbers."""
    N: tl.constexpr = ROWS * BLOCK
    first = tl.program_id(0).to(tl.int64) * ROWS
    left = num_values - first * BLOCK
    at = tl.arange(0, N)
    inside = at < left
    weight, grad, kept = weight + first * BLOCK, grad + first * BLOCK, kept + first * BLOCK
    codes1, codes2, scales1, scales2 = codes1 + first * BLOCK, codes2 + first * BLOCK, scales1 + first, scales2 + first

    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    m = _moments(codes1 + at, scales1, books, inside, left, ROWS) * beta1 + rest1 * g
    v = _moments(codes2 + at, scales2, books + 256, inside, left, ROWS) * beta2 + rest2 * g * g
    finite = tl.abs(g) < float("inf")
    counts = finite & inside
    m, v = tl.where(counts, m, 0.0), tl.where(counts, v, 0.0)

    before = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if KEEPS:
        before += tl.load(kept + at, inside, other=0.0).to(tl.float32)
    after = tl.where(finite, before * shrink - rate * (m / (tl.sqrt(v) * unbias + eps)), before)
    added = _random(seed, first, ROWS) if STOCHASTIC else _half(after)
    rounded = _cut(after, added)
    tl.store(weight + at, rounded, inside)
    if KEEPS:
        rest = after - rounded.to(tl.float32)
        tl.store(kept + at, _cut(rest, _half(rest)), inside)

    _put_back(m, codes1 + at, scales1, midpoints, cells, inside, left, ROWS)
    _put_back(v, codes2 + at, scales2, midpoints + 256, cells + 65536, inside, left, ROWS)


@triton.jit
def _moments(codes, scales, book, inside, left, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    s = tl.load(scales + rows, rows * BLOCK < left, other=0.0)
    return _gather8(book, tl.load(codes, inside, other=0).to(tl.int32), ROWS * BLOCK) * _spread(s, ROWS)


@triton.jit
def _put_back(moments, codes, scales, midpoints, cells, inside, left, ROWS: tl.constexpr):
    """Moments (ROWS·256,) into codes and scales."""
    rows = tl.arange(0, ROWS)
    s = tl.max(tl.reshape(tl.abs(moments), (ROWS, BLOCK)), 1)
    relative = moments * _spread(1.0 / tl.maximum(s, 1.1754943508222875e-38), ROWS)
    cell = (relative.to(tl.int32, bitcast=True) >> 16) & 65535
    lowest = _gather8(cells, cell, ROWS * BLOCK).to(tl.int32)
    code = lowest + (relative > _gather8(midpoints, lowest, ROWS * BLOCK)).to(tl.int32)
    tl.store(codes, code.to(tl.uint8), inside)
    tl.store(scales + rows, s, rows * BLOCK < left)


@triton.jit
def _spread(s, ROWS: tl.constexpr):
    """Each of ``s`` (ROWS,) for all values of its block."""
    return tl.reshape(tl.broadcast_to(s[:, None], (ROWS, BLOCK)), (ROWS * BLOCK,))


@triton.jit
def _gather8(table, index, N: tl.constexpr):
    a, b = tl.split(tl.reshape(index, (N // 2, 2)))
    return tl.reshape(tl.join(_gather4(table, a, N // 2), _gather4(table, b, N // 2)), (N,))


@triton.jit
def _gather4(table, index, N: tl.constexpr):
    a, b = tl.split(tl.reshape(index, (N // 2, 2)))
    return tl.reshape(tl.join(_gather2(table, a, N // 2), _gather2(table, b, N // 2)), (N,))


@triton.jit
def _gather2(table, index, N: tl.constexpr):
    a, b = tl.split(tl.reshape(index, (N // 2, 2)))
    return tl.reshape(tl.join(tl.load(table + a), tl.load(table + b)), (N,))


@triton.jit
def _cut(value, added):
    """float32 → bfloat16: the upper 16 bits, after an addition to all 32. Those of a NaN could go round to zero."""
    bits = (value.to(tl.int32, bitcast=True) + added) & -65536
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def _half(value):
    """What has a cut round to nearest, and to the even one of two."""
    return 32767 + ((value.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit
def _random(seed, first, ROWS: tl.constexpr):
    """int32 (ROWS·256,) of 0 … 65,535."""
    a, b, c, d = tl.randint4x(seed, first.to(tl.int32) * 32 + tl.arange(0, ROWS * 32))
    drawn = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.join(drawn & 65535, (drawn >> 16) & 65535)
    return tl.reshape(halves, (ROWS * BLOCK,)).to(tl.int32)
