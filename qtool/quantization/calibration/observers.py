"""Observers and fake-quantizers: the modules that pt2e puts on the edges of a prepared graph.

``RangeObserver`` watches an activation and changes nothing: it feeds a bounded streaming histogram
(``histogram.py``) from which every range estimator reads afterwards. ``PerChannelWeightObserver`` reads a
constant weight once. ``FakeQuantizer`` is what QAT trains through: it rounds in the forward pass and
passes gradients straight through inside the range (arXiv 1806.08342), its range a moving average of the
batches' minima and maxima.

A new observer is a class here with ``forward`` and ``calculate_qparams``.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.quantization.quantizers.fake_quantize import fake_quantize
from qtool.quantization.quantizers.learned import LearnedSteps
from qtool.quantization.quantizers.pair_sums import fitting
from qtool.quantization.quantizers.qparams import affine_qparams, range_qparams, weight_step
from qtool.quantization.ranges import RangeOptions, estimate, weight_extremes, weight_range
from qtool.quantization.ranges.histogram import Histogram
from qtool.quantization.torchao_api import FakeQuantizeBase, ObserverBase


class Watching(Protocol):
    """Takes part in what an observer passes on."""

    def see(self, observer: RangeObserver, x: Tensor) -> Tensor: ...


class RangeObserver(ObserverBase):  # type: ignore[misc]
    """Records the values of one activation in a streaming histogram; returns them unchanged.

    ``chosen`` is the (low, high) that a range estimator picked; until it is set the exact extremes are
    used. ``num_samples`` is how many samples go through the graph at a time, where that is known. Scales
    are float32, zero points int64, both of shape (1,).
    """

    def __init__(
        self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: torch.qscheme,
        is_dynamic: bool = False, detailed: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.quant_min, self.quant_max, self.qscheme = quant_min, quant_max, qscheme
        self.histogram = Histogram("activation", bins=detailed)
        self.chosen: tuple[float, float] | None = None
        self.fixed: tuple[float, float] | None = None
        self.limits: tuple[float, float] | None = None
        self.enabled = True
        self.num_samples: int | None = None
        self.watch: Watching | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Adds ``x`` to the histogram, shows it to whoever watches, and returns it."""
        if self.enabled:
            self.histogram.update(x.detach(), self.num_samples)
        return x if self.watch is None else self.watch.see(self, x)

    @property
    def options(self) -> RangeOptions:
        """What an estimator of its range is told, but for the percentile."""
        levels = self.quant_max - self.quant_min + 1
        return RangeOptions(num_levels=levels, symmetric=self.qscheme == torch.per_tensor_symmetric)

    @property
    def reached(self) -> bool:
        """Whether a value came by, or none is needed."""
        return self.fixed is not None or self.histogram.minimum <= self.histogram.maximum

    def fix(self, low: float, high: float) -> None:
        """Takes a range that the operator alone decides, whatever the data; they are still looked at."""
        self.fixed = low, high

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the chosen range."""
        low, high = self.fixed or self.chosen or estimate(self.histogram)
        affine_qparams(low, high)  # raises for a range that is none
        return _activation_qparams(torch.tensor([low]), torch.tensor([high]), self)


def _activation_qparams(low: Tensor, high: Tensor, of: Any) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range; a little less of it where rounding would let the activation's limits slip."""
    found = range_qparams(low, high, of)
    if of.limits is None:
        return found
    levels = of.quant_max - of.quant_min
    share = levels / (levels + 0.5)
    keeps = clips_at(*found, of.limits, of.quant_min, of.quant_max)
    scale, zero_point = (
        torch.where(keeps, *both) for both in zip(found, range_qparams(low * share, high * share, of), strict=True)
    )
    return scale, zero_point


def clips_at(scale: Tensor, zero_point: Tensor, limits: tuple[float, float], qmin: int, qmax: int) -> Tensor:
    """Whether everything beyond ``limits`` becomes the least or the greatest integer, whoever else clips."""
    low, high = ((torch.full_like(scale, limit) / scale).round() + zero_point for limit in limits)
    return (low <= qmin) & (high >= qmax)


class PerChannelWeightObserver(ObserverBase):  # type: ignore[misc]
    """Reads a weight's range per output channel, once.

    ``paired``: the groups of a layer whose integers are to fit sums of 16 bits, None of any other.
    """

    def __init__(
        self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: torch.qscheme, ch_axis: int,
        is_dynamic: bool = False, method: str = "minmax", paired: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.quant_min, self.quant_max, self.qscheme, self.ch_axis = quant_min, quant_max, qscheme, ch_axis
        self.method, self.paired = method, paired
        self.register_buffer("end", torch.zeros(0))
        self._seen: tuple[weakref.ref[Tensor], int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Reads the weight's range unless it is the weight that was read last, unchanged; the last one seen counts."""
        if self._seen is None or self._seen[0]() is not x or self._seen[1] != x._version:
            found = weight_range(x.detach(), self.ch_axis, self.method, self.quant_min, self.quant_max)
            self.end = fitting(found, x, self.paired)
            self._seen = weakref.ref(x), x._version
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scales of shape (channels,), float32, and zero points, all zero."""
        if self.end.numel() == 0:
            raise QtoolError("weight observer", "a weight", "none", "run the prepared graph once before converting it")
        scale = weight_step(self.end, self.quant_min, self.quant_max)
        return scale, torch.zeros_like(scale, dtype=torch.int64)


class FakeQuantizer(FakeQuantizeBase):  # type: ignore[misc]
    """Quantizes and dequantizes an activation with gradients; its range is a moving average.

    ``low`` and ``high`` follow each batch's extremes by ``averaging`` (torch.ao's default 0.01), or are
    the extremes of all batches with None; the first batch sets them. Nothing in a step waits for a GPU or leaves a
    compiled graph: a range that is not finite makes the output NaN, and ``calculate_qparams`` names the layer.
    """

    is_per_channel = False
    low: Tensor
    high: Tensor

    def __init__(
        self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: torch.qscheme,
        is_dynamic: bool = False, averaging: float | None = 0.01, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dtype, self.is_dynamic = dtype, is_dynamic
        self.quant_min, self.quant_max, self.qscheme = quant_min, quant_max, qscheme
        self.averaging, self.name = averaging, "activation"
        self.fixed, self.limits = False, None  # type: bool, tuple[float, float] | None
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32))
        self.observing = self.quantizing = True
        self.learner: LearnedSteps | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Updates the range while observing, then fake-quantizes."""
        if self.learner is not None and self.quantizing:
            return self.learner(x, self.observing)  # type: ignore[no-any-return]
        if self.observing:
            self._observe(x.detach())
        if not self.quantizing:
            return x
        return fake_quantize(x, self.scale, self.zero_point, self.quant_min, self.quant_max)

    def _observe(self, x: Tensor) -> None:
        if self.fixed or not x.numel():  # none of a batch's rows went to an expert
            return
        low, high = (value.float() for value in torch.aminmax(x))
        if self.averaging is None:
            low, high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        else:
            first, share = torch.isposinf(self.low), self.averaging
            low = torch.where(first, low, self.low.lerp(low, share))
            high = torch.where(first, high, self.high.lerp(high, share))
        self.low.copy_(low)
        self.high.copy_(high)
        self._refresh()

    def set_range(self, low: float, high: float) -> None:
        """Starts the moving average from a calibrated range; a fixed one stays."""
        if self.fixed:
            return
        self.low.fill_(low)
        self.high.fill_(high)
        self._refresh()

    def fix(self, low: float, high: float) -> None:
        """Takes a range that the operator alone decides, for good."""
        self.set_range(low, high)
        self.fixed = True

    @property
    def reached(self) -> bool:
        """Whether a value came by; what is not finite counts."""
        return not (float(self.low) == math.inf and float(self.high) == -math.inf)

    def range(self) -> tuple[float, float]:
        """The range as it is now."""
        return self.learner.range() if self.learner is not None else (float(self.low), float(self.high))

    def _refresh(self) -> None:
        scale, zero_point = _activation_qparams(self.low.reshape(1), self.high.reshape(1), self)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scale and zero point of the current range."""
        if self.learner is not None:
            return self.learner.qparams()
        low, high = float(self.low), float(self.high)
        if not (low <= high and math.isfinite(low) and math.isfinite(high)):
            raise QtoolError(
                f"layer '{self.name}'", "finite min <= max", f"{low}, {high}",
                "check the inputs, and the weights of the layers before it",
            )  # fmt: skip
        return _activation_qparams(self.low.reshape(1), self.high.reshape(1), self)


class PerChannelFakeQuantizer(FakeQuantizeBase):  # type: ignore[misc]
    """Fake-quantizes a weight per output channel, its scale read from the weight itself at each step.

    ``paired``: as of ``PerChannelWeightObserver``.
    """

    is_per_channel = True
    scale: Tensor

    def __init__(
        self, dtype: torch.dtype, quant_min: int, quant_max: int, qscheme: torch.qscheme, ch_axis: int,
        is_dynamic: bool = False, paired: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dtype, self.is_dynamic = dtype, is_dynamic
        self.quant_min, self.quant_max, self.qscheme, self.ch_axis = quant_min, quant_max, qscheme, ch_axis
        self.register_buffer("scale", torch.zeros(0))
        self.observing = self.quantizing = True
        self.method, self.paired = "minmax", paired
        self.learner: LearnedSteps | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantizes ``x`` with scales from ``x`` (or from when observing stopped)."""
        if self.learner is not None and self.quantizing:
            return self.learner(x, self.observing)  # type: ignore[no-any-return]
        weight = x.detach()
        if self.observing or self.scale.numel() == 0:
            self.scale = weight_step(self._ends(weight), self.quant_min, self.quant_max)
        if not self.quantizing:
            return x
        zero = torch.zeros_like(self.scale, dtype=torch.int32)
        paired = None if self.observing else self.paired  # those of a step that is as wide as they need fit
        return fake_quantize(x, self.scale, zero, self.quant_min, self.quant_max, self.ch_axis, paired)

    def _ends(self, weight: Tensor) -> Tensor:
        if self.method == "minmax":
            ends = weight_extremes(weight, self.ch_axis)
        else:
            ends = weight_range(weight, self.ch_axis, self.method, self.quant_min, self.quant_max)
        return fitting(ends, weight, self.paired)

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """Scales of shape (channels,), float32, and zero points, all zero."""
        if self.learner is not None:
            return self.learner.qparams()
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the saved scales' shape first: a module that has not seen its weight does not know it."""
        saved = state_dict.get(f"{prefix}scale")
        if isinstance(saved, Tensor):
            self.scale = self.scale.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


FAKE_QUANTIZERS = (FakeQuantizer, PerChannelFakeQuantizer)


def named(observers: dict[str, Any]) -> dict[str, Any]:
    """The observers of activations by the tensor they watch, each told that name for its errors."""
    for name, observer in observers.items():
        (observer if isinstance(observer, FakeQuantizer) else observer.histogram).name = name
    return observers
