"""Which integer convolutions oneDNN gets wrong on CPUs with AMX, by the way in which it makes products of them.

OpenVINO (2026.4) and PyTorch (2.13) convolve bytes with it (``brgconv_avx512_amx``). Where a group reads fewer than 32
channels, it multiplies n numbers at a time, in blocks of 64: the channels of all taps in a row, or of the whole window
where that fills the blocks better and the result has a multiple of 16 columns, or more than 48. The weights are stored
anew for that, unless channels come by fours and n fills one block or whole ones; those of a window with several rows
and columns always are. Wrong, by −19 to 8 dB and of most sizes, are

- weights that are stored anew, of groups with more than 16 results each;
- weights that stay, of more than one block (16 channels, 8 taps), or of a window of one column and several rows;
- results of one column and several rows, of windows of several columns and with a stride along them;
- windows of 5 rows and more, set apart: they write beyond their memory, of which the process may die.

The others of ten thousand that were tried, of 1 to 256 channels and 1 to 128 taps, are right, grouped or not, and so
are all but the first, of one channel, with ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI``. Columns that are set apart are
multiplied otherwise, and over volumes there is neither a window nor a weight that is stored anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 32
"""Channels of a group with which it multiplies otherwise, and rightly."""
_MANY_RESULTS = 16
_BLOCK, _FOUR = 64, 4
_COLUMNS, _WIDE, _FULL = 16, 48, 0.7
_TALL = 5


@dataclass(frozen=True)
class Geometry:
    """A convolution: its weight's shape, and along each axis a stride, a dilation and a size of the result.

    ``result`` holds no number where a size is not known.
    """

    weight: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    groups: int
    result: Sequence[int | None]


def errs(conv: Geometry) -> bool:
    """Whether the results of a convolution of bytes are wrong, or may well be where a size is not known."""
    rows, columns = math.prod(conv.weight[2:-1]), conv.weight[-1]
    in_one_column = conv.result[-1] == 1 and any(size != 1 for size in conv.result[:-1])
    if in_one_column and columns > 1 and conv.strides[-1] > 1:
        return True
    is_apart = any(step > 1 for step in conv.dilations[:-1])
    if is_apart and rows >= _TALL:
        return True
    return conv.weight[1] < FEW and conv.dilations[-1] == 1 and _errs_about_few(conv, is_flat=not is_apart)


def _errs_about_few(conv: Geometry, *, is_flat: bool) -> bool:
    outputs, channels, *taps = conv.weight
    crowded = conv.groups > 1 and outputs // conv.groups > _MANY_RESULTS and len(taps) < 3
    row, window = channels * taps[-1], channels * math.prod(taps)
    by_row = taps[-1] > 1 and (row > _BLOCK if _stays(row, channels) else crowded)
    if len(taps) != 2 or taps[0] == 1 or not is_flat or not _fills_better(window, row, taps[-1]):
        return by_row
    by_window = crowded or (taps[-1] == 1 and _stays(window, channels))
    columns = conv.result[-1]
    if columns is None:
        return by_row or by_window
    return by_window if columns % _COLUMNS == 0 or columns > _WIDE else by_row


def _stays(numbers: int, channels: int) -> bool:
    """Whether the weights of so many numbers at a time are multiplied as they lie."""
    return channels % _FOUR == 0 and (numbers <= _BLOCK or numbers % _BLOCK == 0)


def _fills_better(window: int, row: int, columns: int) -> bool:
    """Whether whole windows fill the blocks, and better than their rows of so many taps."""
    return _fullness(window) > (max(_fullness(row), _FULL) if columns > 1 else _fullness(row))


def _fullness(numbers: int) -> float:
    return numbers / (_BLOCK * math.ceil(numbers / _BLOCK))
