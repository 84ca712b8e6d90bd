"""What each number format makes of a number, computed exactly.

A binary float of e exponent and f fraction bits holds ±(1 + k/2^f)·2^E for E from 1-bias to bias, and
below the smallest of these the subnormals ±k·2^(1-bias-f); bias = 2^(e-1) - 1. A value is stored as the
nearest number of the format, a tie as the one whose last fraction bit is 0 (IEEE 754, round half to even).
An integer format stores q = clamp(round_half_even(value / scale)) and stands for q·scale, zero point 0.

Beyond the largest number, from half a step on:

=========================  ==========================================================================
FP32, TF32, FP16, BF16     infinity (IEEE 754)
FP8 e5m2                   infinity: an IEEE format too
FP8 e4m3                   NaN: the format (arXiv 2209.05433, "fn") has no infinities, and an infinity is NaN too;
                           its largest exponent holds numbers as well, all but the last, so that it ends at 448.
                           Conversions may saturate instead: ONNX's Cast does by default, and torch 2.13
INT8, INT4                 the end of the range: they saturate, infinities too; NaN has no integer and no value
=========================  ==========================================================================

TF32 is what a GPU's matrix units read of an FP32 number; it occupies the same four bytes. Values are
exact fractions, as they were written: ``0.1`` is one tenth and not the double nearest to it. So rounding
happens once, where converting through a second format can round twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from qtool.errors import UsageError

Value = Fraction | float
"""An exact number; as a float only infinities, NaN and minus zero."""
_WORDS = {"pi": Fraction(math.pi), "π": Fraction(math.pi), "e": Fraction(math.e)}
_LARGEST_EXPONENT = 300
_HEXADECIMAL = re.compile(r"([+-]?)0x(?=\.?[0-9a-f])([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?[0-9]+))?")
MINUS_ZERO = -0.0


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format. ``bits`` is what it needs, ``bytes`` what it occupies."""

    name: str
    exponent_bits: int
    fraction_bits: int
    bytes: float
    infinities: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        if self.infinities:
            return (2 - _power(-self.fraction_bits)) * _power(self.bias)
        return (2 - _power(1 - self.fraction_bits)) * _power(self.bias + 1)

    @property
    def lowest(self) -> Fraction:
        return -self.largest

    @property
    def smallest(self) -> Fraction:
        """The smallest positive number, a subnormal."""
        return _power(1 - self.bias - self.fraction_bits)

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive number of full precision."""
        return _power(1 - self.bias)

    def store(self, value: Value) -> Value:
        """The number of the format that ``value`` is stored as; see the module for what overflows."""
        if isinstance(value, float):
            return math.nan if math.isinf(value) and not self.infinities else value
        size = abs(value)
        step = self.smallest * _power(max(0, _exponent(size) + self.bias - 1)) if size else self.smallest
        rounded = round(size / step) * step  # Python rounds a Fraction half to even
        if rounded > self.largest:
            return math.copysign(math.inf, value) if self.infinities else math.nan
        if not rounded and value < 0:
            return MINUS_ZERO
        return rounded if value > 0 else -rounded


@dataclass(frozen=True)
class IntegerFormat:
    """A signed integer format with a scale, in real units per step."""

    name: str
    bits: int
    scale: Fraction = Fraction(1)

    @property
    def bytes(self) -> float:
        return self.bits / 8

    @property
    def lowest(self) -> Fraction:
        return -_power(self.bits - 1) * self.scale

    @property
    def largest(self) -> Fraction:
        return (_power(self.bits - 1) - 1) * self.scale

    @property
    def smallest(self) -> Fraction:
        """The smallest positive number: one step."""
        return self.scale

    def store(self, value: Value) -> Value:
        """The multiple of the scale that ``value`` is stored as, clamped to the range; NaN for NaN, which has none."""
        if isinstance(value, float):
            if math.isnan(value):
                return value
            return self.largest if value > 0 else self.lowest if value < 0 else Fraction(0)
        return min(max(round(value / self.scale) * self.scale, self.lowest), self.largest)


FLOATS = (
    FloatFormat("FP32", 8, 23, 4),
    FloatFormat("TF32", 8, 10, 4),
    FloatFormat("FP16", 5, 10, 2),
    FloatFormat("BF16", 8, 7, 2),
    FloatFormat("FP8 e4m3", 4, 3, 1, infinities=False),
    FloatFormat("FP8 e5m2", 5, 2, 1),
)


def formats(scale: Fraction = Fraction(1)) -> tuple[FloatFormat | IntegerFormat, ...]:
    """Every format, the integer ones with ``scale``."""
    return (*FLOATS, IntegerFormat("INT8", 8, scale), IntegerFormat("INT4", 4, scale))


def _power(exponent: int) -> Fraction:
    """2^exponent, exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def _exponent(size: Fraction) -> int:
    """floor(log2(size)) for size > 0, exactly."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if size >= _power(guess) else guess - 1


def parse(text: str) -> Value:
    """A number as it was written, exactly: ``3.14``, ``1e-8``, ``1/3``, ``0x1p-3``, ``pi``, ``e``, ``inf``, ``nan``.

    Raises UsageError for anything else, and beyond 10^±300, where no format here has numbers.
    """
    word = text.strip().lower()
    if word.lstrip("+-") in _WORDS:
        return -_WORDS[word.lstrip("+-")] if word.startswith("-") else _WORDS[word.lstrip("+-")]
    if "0x" in word:
        return _from_hexadecimal(word, text)
    parts = [_decimal(part, text) for part in word.split("/")]
    if len(parts) == 1 and not parts[0].is_finite():
        return float(parts[0])
    if len(parts) > 2 or not all(part.is_finite() for part in parts) or (len(parts) == 2 and not parts[1]):
        raise _unreadable(text)
    value = Fraction(parts[0]) / (Fraction(parts[1]) if len(parts) == 2 else 1)
    return MINUS_ZERO if not value and word.startswith("-") else _within_reach(value, text)


def _from_hexadecimal(word: str, text: str) -> Value:
    if not (found := _HEXADECIMAL.fullmatch(word)):
        raise _unreadable(text)
    sign, whole, part, power = found.groups()
    digits, exponent = int(whole + part, 16), float(power or 0)
    if not digits:
        return MINUS_ZERO if sign == "-" else Fraction(0)
    if abs(exponent) > 4 * (_LARGEST_EXPONENT + len(word)):  # 2^4 is more than 10: no digits make up for it
        raise _too_far(text, exponent > 0)
    value = digits * _power(int(exponent) - 4 * len(part))
    return _within_reach(-value if sign == "-" else value, text)


def _decimal(part: str, text: str) -> Decimal:
    try:
        value = Decimal(part)
    except InvalidOperation:
        raise _unreadable(text) from None
    if value.is_finite() and value and abs(value.adjusted()) > _LARGEST_EXPONENT:
        raise _too_far(text, value.adjusted() > 0)
    return value


def _within_reach(value: Fraction, text: str) -> Fraction:
    largest = Fraction(10**_LARGEST_EXPONENT)
    if value and not 1 / largest <= abs(value) <= largest:
        raise _too_far(text, abs(value) > 1)
    return value


def _too_far(text: str, is_large: bool) -> UsageError:
    got, do = ("a larger one", "write inf") if is_large else ("a smaller one", "write 0")
    return UsageError(f"number '{text}'", "0, or a size from 1e-300 to 1e300", got, do)


def _unreadable(text: str) -> UsageError:
    return UsageError(f"number '{text}'", "a number", "other text", "write for example 3.14, 1e-8, 1/3, pi, inf or nan")


def parse_scale(text: str) -> Fraction:
    """A scale: a finite number above zero. Raises UsageError."""
    where, expected, do = "option '--scale'", "a finite number above 0", "write for example --scale 0.05"
    try:
        value = parse(text)
    except UsageError as error:
        raise UsageError(where, expected, text, do) from error
    if isinstance(value, float) or value <= 0:
        raise UsageError(where, expected, text, do)
    return value


def describe(scale: Fraction = Fraction(1)) -> list[dict[str, Any]]:
    """Every format in figures: bits of sign, exponent and fraction, bytes, range, smallest positive number."""
    return [_figures(form) for form in formats(scale)]


def _figures(form: FloatFormat | IntegerFormat) -> dict[str, Any]:
    figures: dict[str, Any] = {"name": form.name, "sign_bits": 1}
    if isinstance(form, FloatFormat):
        figures |= {"exponent_bits": form.exponent_bits, "fraction_bits": form.fraction_bits, "scale": None}
    else:
        figures |= {"exponent_bits": 0, "fraction_bits": form.bits - 1, "scale": float(form.scale)}
    return figures | {
        "bytes": form.bytes,
        "lowest": float(form.lowest),
        "largest": float(form.largest),
        "smallest_positive": float(form.smallest),
        "smallest_normal": float(form.smallest_normal) if isinstance(form, FloatFormat) else None,
    }


@dataclass(frozen=True)
class Stored:
    """A value in one format. ``error`` is stored - value; it and ``relative_error`` are None where undefined."""

    name: str
    stored: float
    error: float | None
    relative_error: float | None


def store_everywhere(value: Value, scale: Fraction = Fraction(1)) -> list[dict[str, Any]]:
    """What every format makes of ``value``."""
    return [asdict(_stored(form, value)) for form in formats(scale)]


def _stored(form: FloatFormat | IntegerFormat, value: Value) -> Stored:
    stored = form.store(value)
    if not (_finite(value) and _finite(stored)):
        return Stored(form.name, float(stored), None, None)
    error = Fraction(stored) - Fraction(value)
    relative = float(abs(error / Fraction(value))) if value else None
    return Stored(form.name, float(stored), float(error), relative)


def _finite(value: Value) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def numerics(texts: tuple[str, ...], scale: str = "1") -> dict[str, Any]:
    """The result of ``qtool numerics``: every format, and each number in every format. Raises UsageError."""
    step = parse_scale(scale)
    return {"scale": float(step), "formats": describe(step), "values": [_everywhere(text, step) for text in texts]}


def _everywhere(text: str, scale: Fraction) -> dict[str, Any]:
    value = parse(text)
    return {"text": text, "value": float(value), "stored": store_everywhere(value, scale)}
