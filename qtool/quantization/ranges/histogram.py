"""A bounded histogram of a stream of tensors, on a grid that coarsens without losing a count.

Bins are ``[k·w, (k+1)·w)`` with ``w = 2^e`` and integer ``k`` from −4096 to 4095: aligned to zero, the
width a power of two. When a larger magnitude arrives, ``e`` grows and bin ``k`` becomes ``k >> 1``:
two neighbours merge into exactly the bin that the values would have fallen into from the start. ``e``
is the least that covers the largest magnitude seen, and ``x · 2^-e`` is exact in float64, so the counts
depend on the values alone: not on their order, and not on how they were cut into batches. (An observer
that spreads old counts over new bins, as torch.ao's ``HistogramObserver`` does, has neither property.)
The larger side of the data always has 2,049 to 4,096 bins: at least eight per step of an 8-bit quantizer.

Minimum and maximum are taken over every value, in one fused pass; NaN and infinity show there at no cost.
The counts are taken over a fixed part of each sample: at most about ``VALUES_PER_SAMPLE`` values, a
constant stride apart that shares no factor with the sample's dimensions, so that every channel, row and
column is visited. Each counted value stands for ``stride`` values. Reading every value into bins would
cost several times the forward pass; the pass over all of them for the extremes is what remains.

Beside them runs an average of each sample's own extremes: the plain mean of the first ``AVERAGED`` samples, from there
on exponential. It is the one thing here that depends on the order of the samples; batches make no difference to it.

Zeros are also counted on their own: after a ReLU they are most of the data, and they cost nothing,
since every quantizer here represents 0.0 exactly.

Left out on purpose: per-channel histograms (per-channel activation scales run in float on every target).
"""

from __future__ import annotations

import base64
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qtool.errors import QtoolError
from qtool.quantization.ranges.tails import Tails

HALF_BINS = 4096
"""Bins on either side of zero; a power of two."""
VALUES_PER_SAMPLE = 2048
"""About how many values of one sample are counted; a larger sample is read with a stride."""
WEIGHT = 1024
"""What a value of weight 1 counts in a histogram that was told to weigh."""
AVERAGED = 100
"""How many samples the moving average of extremes looks back on: each later one moves it by 1 / 100."""
SMALL = 4096
"""A sample of fewer values is not worth an operator of its own."""
_LEAST_EXPONENT = -126  # of the bin width: the least normal float32 is one bin

Counts = npt.NDArray[np.int64]


class Histogram:
    """What is known of one tensor of a network after some calibration batches: range, counts, zeros.

    ``name`` is the layer's, for errors. With ``bins`` off only minimum and maximum are kept, which
    is cheaper and serves ``minmax`` ranges alone. Memory is constant: 64 KiB. After ``weigh`` a value counts with the
    weight of its channel.
    """

    def __init__(self, name: str, *, bins: bool = True) -> None:
        self.name = name
        self.bins = bins
        self.minimum = math.inf
        self.maximum = -math.inf
        self.num_samples = 0
        self.num_zeros = 0
        self.tails: Tails | None = None
        self.average = (math.nan, math.nan)
        self.exponent = _LEAST_EXPONENT
        self.counts: Counts = np.zeros(2 * HALF_BINS if bins else 0, dtype=np.int64)
        self._weights: tuple[int, Counts] | None = None

    def weigh(self, axis: int, weights: torch.Tensor) -> None:
        """Counts values by the weight of their index along ``axis`` of a sample, in parts of ``WEIGHT`` and at least 1.

        ``weights`` has a mean of 1; tensors of another size along the axis are counted evenly.
        """
        parts = (weights.double() * WEIGHT).round().clamp(1, WEIGHT**2)
        self._weights = axis, parts.to(torch.int64).numpy()

    def update(self, x: torch.Tensor, num_samples: int | None = None) -> None:
        """Adds a batch. Changes nothing when it raises.

        ``x``: any shape, samples along the first dimension, any real dtype and device. float64 is
        read as float32. Where there are ``num_samples`` and the first dimension is a multiple of it, as that of rows of
        tokens is, consecutive parts of it count as samples: where time comes first, these are stretches of time.
        Raises QtoolError when a value is NaN or infinite.
        """
        x = x.detach()
        if x.ndim == 0:
            x = x.reshape(1)
        if x.numel() == 0:
            return
        whole = num_samples or x.shape[0]
        joined = x.shape[0] != whole and x.shape[0] % whole == 0
        if joined:
            x = x.reshape(whole, -1, *x.shape[1:])
        extremes = self._extremes(x if self.bins else x[None])
        self.minimum = min(self.minimum, *(low for low, _ in extremes))
        self.maximum = max(self.maximum, *(high for _, high in extremes))
        self._average(extremes)
        self.num_samples += x.shape[0]
        if self.bins:
            self._coarsen(_exponent(max(-self.minimum, self.maximum)))
            values, stride = subsample(x)
            self._count(values, stride, self._weights_of(tuple(x.shape[1:]), stride, int(joined)))

    def _average(self, extremes: list[tuple[float, float]]) -> None:
        """Moves the average of extremes towards those of each sample in turn, zero among its values."""
        for index, (least, most) in enumerate(extremes, self.num_samples + 1):
            low, high, part = min(least, 0.0), max(most, 0.0), 1 / min(index, AVERAGED)
            before = (low, high) if index == 1 else self.average
            self.average = before[0] + part * (low - before[0]), before[1] + part * (high - before[1])

    def _weights_of(self, shape: tuple[int, ...], stride: int, more: int) -> Counts | None:
        """The weight of each value of a sample that ``subsample`` chooses, which has ``more`` axes in front."""
        if self._weights is None:
            return None
        axis, weights = self._weights[0] + more, self._weights[1]
        if axis >= len(shape) or shape[axis] != len(weights):
            return None
        return np.asarray(weights[_coordinates(shape, stride)[axis]])

    @property
    def bin_width(self) -> float:
        """Real units per bin; bin ``i`` of ``counts`` is ``[(i − 4096)·w, (i − 4095)·w)``."""
        return math.ldexp(1.0, self.exponent)

    @property
    def total(self) -> int:
        """The number of values that the counts stand for."""
        return int(self.counts.sum())

    def require_data(self) -> None:
        """Raises QtoolError when nothing was observed."""
        if not self.minimum <= self.maximum:
            raise QtoolError(
                f"layer '{self.name}'",
                "finite min <= max",
                f"{self.minimum}, {self.maximum}",
                "pass at least one calibration batch",
            )

    def require_counts(self, method: str) -> None:
        """Raises QtoolError when nothing was observed, or only the extremes were kept."""
        self.require_data()
        if not self.bins:
            raise QtoolError(
                f"layer '{self.name}'",
                f"a histogram, which '{method}' ranges are read from",
                "minimum and maximum only",
                "calibrate again with this method, or use 'minmax' ranges",
            )

    def merge(self, other: Histogram) -> None:
        """Adds what ``other`` saw, as if this histogram had seen it too; ``other`` stays as it is."""
        if self.bins != other.bins:
            raise QtoolError(
                f"layer '{self.name}'", "two histograms, or two without counts", "one of each",
                "observe both parts in the same way",
            )  # fmt: skip
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        if self.num_samples and other.num_samples:
            part = other.num_samples / (self.num_samples + other.num_samples)
            (low, high), (least, most) = self.average, other.average
            self.average = low + part * (least - low), high + part * (most - high)
        elif other.num_samples:
            self.average = other.average
        self.num_samples += other.num_samples
        self.num_zeros += other.num_zeros
        if self.bins:
            self._coarsen(other.exponent)
            self.counts += _coarser(other.counts, self.exponent - other.exponent)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values; the counts as base64 of deflated little-endian int64."""
        packed = base64.b64encode(zlib.compress(self.counts.astype("<i8").tobytes(), 6)).decode()
        empty = not self.minimum <= self.maximum
        return {
            "name": self.name,
            "minimum": None if empty else self.minimum,
            "maximum": None if empty else self.maximum,
            "num_samples": self.num_samples,
            "average": None if empty or not self.bins else list(self.average),
            "num_zeros": self.num_zeros,
            "exponent": self.exponent,
            "counts": packed if self.bins else None,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Histogram:
        """The histogram that ``state_dict`` described. Raises QtoolError on anything else."""
        name = str(state.get("name", "?"))
        try:
            made = cls(name, bins=state["counts"] is not None)
            if state["minimum"] is not None:
                made.minimum, made.maximum = float(state["minimum"]), float(state["maximum"])
            if state.get("average") is not None:  # ranges of an earlier version have none
                made.average = (float(state["average"][0]), float(state["average"][1]))
            made.num_samples, made.num_zeros = int(state["num_samples"]), int(state["num_zeros"])
            made.exponent = int(state["exponent"])
            if made.bins:
                raw = zlib.decompress(base64.b64decode(state["counts"], validate=True))
                made.counts += np.frombuffer(raw, dtype="<i8")
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, zlib.error) as error:
            raise QtoolError(
                f"saved histogram of layer '{name}'", "what state_dict() returned", repr(error), "calibrate again"
            ) from error
        return made

    def _extremes(self, x: torch.Tensor) -> list[tuple[float, float]]:
        """The least and the largest value of each index of the first dimension."""
        if x[0].numel() < SMALL:
            found = torch.stack(torch.aminmax(x.reshape(len(x), -1), dim=1), dim=1)
        else:  # a sweep in the order of memory for each, which no reduction over several dimensions is
            found = torch.stack([torch.stack(torch.aminmax(_in_memory_order(part))) for part in x])
        extremes = found.to(torch.float32).tolist()  # one transfer from a GPU
        low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
        if not all(math.isfinite(end) for pair in extremes for end in pair):
            found_nan = any(math.isnan(end) for pair in extremes for end in pair)
            raise QtoolError(
                f"layer '{self.name}'", "finite values", "NaN" if found_nan else f"infinity ({low:g} to {high:g})",
                "check the calibration data, and the weights of the layers before it",
            )  # fmt: skip
        return [(low, high) for low, high in extremes]

    def _coarsen(self, exponent: int) -> None:
        if exponent > self.exponent:
            self.counts = _coarser(self.counts, exponent - self.exponent)
            self.exponent = exponent

    def _count(self, values: torch.Tensor, stride: int, weights: Counts | None) -> None:
        count = count_numpy if values.device.type == "cpu" else count_torch
        counts, num_zeros = count(values, 2.0**-self.exponent, weights)
        self.counts += counts * stride
        self.num_zeros += num_zeros * stride


def count_numpy(values: torch.Tensor, per_bin: float, weights: Counts | None = None) -> tuple[Counts, int]:
    """(counts, number of zeros) of float32 ``values`` in host memory, ``per_bin`` being one over the bin width.

    ``weights``: what one of each column of ``values`` counts; 1 by default.
    On one thread: at these sizes that beats ``torch.bincount``, which is serial too, behind a thread barrier.
    """
    array = values.numpy()
    scaled = np.multiply(array, per_bin, dtype=np.float64)
    indices = np.floor(scaled, out=scaled).astype(np.intp)
    indices += HALF_BINS
    if weights is not None:  # sums of integers below 2^53 are exact in float64
        each = np.broadcast_to(weights, array.shape)
        counts = np.bincount(indices.ravel(), each.ravel(), minlength=2 * HALF_BINS).astype(np.int64)
        return counts, int(weights @ (array == 0).sum(0))
    counts = np.bincount(indices.ravel(), minlength=2 * HALF_BINS)
    return counts, array.size - int(np.count_nonzero(array))


def count_torch(values: torch.Tensor, per_bin: float, weights: Counts | None = None) -> tuple[Counts, int]:
    """``count_numpy`` where the values lie, with one transfer to the host."""
    indices = (values.to(torch.float64) * per_bin).floor_().to(torch.int64).add_(HALF_BINS)
    each = torch.ones(1) if weights is None else torch.from_numpy(weights)
    each = each.to(values.device, torch.float64).expand_as(values)
    counts = torch.bincount(indices.reshape(-1), each.reshape(-1), minlength=2 * HALF_BINS).to(torch.int64)
    host = torch.cat((counts, each[values == 0].sum().to(torch.int64).reshape(1))).cpu().numpy()
    return host[:-1], int(host[-1])


def subsample(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The values of ``x`` that are counted, as float32 samples × values, and how many each stands for.

    The choice depends on the shape of one sample only: the same for every batch size and memory format.
    """
    shape = tuple(x.shape[1:])
    stride = sample_stride(shape)
    if x.is_contiguous():
        chosen = x.view(x.shape[0], -1)[:, ::stride]
    else:  # a gather from where the values lie is far cheaper than a contiguous copy
        index: list[slice | torch.Tensor] = [slice(None)]
        index += [torch.from_numpy(i).to(x.device) for i in _coordinates(shape, stride)]
        chosen = x[tuple(index)].reshape(x.shape[0], -1)
    return chosen.to(torch.float32), stride


@functools.cache
def sample_stride(shape: tuple[int, ...]) -> int:
    """The least stride that takes at most ``VALUES_PER_SAMPLE`` values and is coprime with every dimension.

    >>> sample_stride((64, 4, 4))
    1
    >>> sample_stride((96, 112, 112))
    589
    """
    size = math.prod(shape)
    stride = max(1, math.ceil(size / VALUES_PER_SAMPLE))
    while any(math.gcd(stride, dimension) > 1 for dimension in shape) and stride < size:
        stride += 1
    return stride


@functools.lru_cache(maxsize=256)
def _coordinates(shape: tuple[int, ...], stride: int) -> tuple[npt.NDArray[np.intp], ...]:
    return np.unravel_index(np.arange(0, math.prod(shape), stride), shape) if shape else ()


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its dimensions sorted by stride: a dense view where one exists, so that reading it is one sweep."""
    return x if x.is_contiguous() else x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))


def _exponent(magnitude: float) -> int:
    """The least ``e`` for which every ``|x| <= magnitude`` lies in the grid of width ``2^e``."""
    if magnitude == 0:
        return _LEAST_EXPONENT
    _, above = math.frexp(magnitude)  # magnitude < 2^above
    return max(_LEAST_EXPONENT, above - HALF_BINS.bit_length() + 1)


def _coarser(counts: Counts, doublings: int) -> Counts:
    """``counts`` on the grid whose bins are ``2^doublings`` times as wide."""
    doublings = min(doublings, HALF_BINS.bit_length() - 1)  # by then all is in the two bins beside zero
    merged = counts.reshape(-1, 2**doublings).sum(axis=1)
    result = np.zeros_like(counts)
    start = HALF_BINS - (HALF_BINS >> doublings)
    result[start : start + merged.size] = merged
    return result
