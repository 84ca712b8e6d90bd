"""Number formats against the conversions of numpy, ml_dtypes and torch."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qtool.errors import UsageError
from qtool.memory.formats import FLOATS, FloatFormat, IntegerFormat, formats, numerics, parse, parse_scale

BY_NAME = {form.name: form for form in formats()}
TORCH = {
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP8 e4m3": torch.float8_e4m3fn,
    "FP8 e5m2": torch.float8_e5m2,
}
REAL = st.floats(width=32, allow_subnormal=True)
NEAR = st.builds(lambda m, e: math.ldexp(m, e), st.integers(-4095, 4095), st.integers(-160, 18))
"""Few bits of significand: ties between two neighbours are common among these."""


def exact(value: float) -> Any:
    return (
        Fraction(value) if math.isfinite(value) and value else (value if value or 1 / _sign(value) < 0 else Fraction(0))
    )


def _sign(value: float) -> float:
    return math.copysign(1.0, value)


def same(stored: Any, reference: float) -> bool:
    got = float(stored)
    if math.isnan(reference):
        return math.isnan(got)
    return got == reference and math.copysign(1, got) == math.copysign(1, reference)


def tf32(value: float) -> float:
    """Round half to even at bit 13, by hand on the bits of the float32."""
    if not math.isfinite(value):
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF & 0xFFFFFFFF
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@pytest.mark.parametrize("text", ["1e301", "0x1p5000", "-0x1p1000", "0x1p" + "9" * 5000, "9e-301", "0x1p-5000"])
def test_a_number_beyond_reach_is_told_as_too_large_or_too_small(text: str) -> None:
    told = "smaller one; write 0" if "-" in text[1:] else "larger one; write inf"
    with pytest.raises(UsageError, match=f"expected 0, or a size from 1e-300 to 1e300; got a {told}$"):
        parse(text)


@given(st.floats(-9e299, 9e299).filter(lambda value: not value or abs(value) > 1e-300))
def test_hexadecimals_are_read_exactly(value: float) -> None:
    assert same(parse(value.hex()), value)
    assert parse("0x1.00000000000000000001p0") - 1 == Fraction(1, 16**20)


@pytest.mark.parametrize("name", TORCH)
@given(value=REAL | NEAR)
def test_the_16_and_8_bit_formats_are_torchs(name: str, value: float) -> None:
    value = float(np.float32(value))
    if name == "FP8 e4m3":
        assume(abs(value) <= 464)  # beyond, versions of torch differ: NaN or 448
    reference = torch.tensor(value, dtype=torch.float32).to(TORCH[name]).double().item()
    assert same(BY_NAME[name].store(exact(value)), reference)


@pytest.mark.parametrize("name", ["BF16", "FP8 e4m3", "FP8 e5m2"])
@given(value=REAL | NEAR)
def test_they_are_ml_dtypes_too(name: str, value: float) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = {"BF16": "bfloat16", "FP8 e4m3": "float8_e4m3fn", "FP8 e5m2": "float8_e5m2"}[name]
    with np.errstate(all="ignore"):
        reference = float(np.float32(value).astype(getattr(ml_dtypes, kind)))
    assert same(BY_NAME[name].store(exact(float(np.float32(value)))), reference)


@given(value=st.floats() | NEAR)
def test_fp32_is_numpys(value: float) -> None:
    with np.errstate(all="ignore"):
        assert same(BY_NAME["FP32"].store(exact(value)), float(np.float32(value)))


@given(value=st.floats())
def test_fp16_from_doubles_is_numpys(value: float) -> None:
    with np.errstate(all="ignore"):
        assert same(BY_NAME["FP16"].store(exact(value)), float(np.float16(value)))


@given(value=REAL)
def test_tf32_is_fp32_rounded_at_bit_13(value: float) -> None:
    assert same(BY_NAME["TF32"].store(exact(value)), tf32(value))


@pytest.mark.parametrize(("name", "kind"), [("FP32", torch.float32), *TORCH.items()])
def test_ranges_are_those_of_finfo(name: str, kind: torch.dtype) -> None:
    form, info = BY_NAME[name], torch.finfo(kind)
    assert isinstance(form, FloatFormat)
    assert (float(form.largest), float(form.lowest)) == (info.max, info.min)
    assert float(form.smallest_normal) == info.tiny
    assert form.bits == info.bits == form.bytes * 8


def test_the_smallest_numbers_are_subnormal() -> None:
    assert BY_NAME["FP16"].smallest == Fraction(1, 2**24)
    assert BY_NAME["FP32"].smallest == Fraction(1, 2**149)
    for form in FLOATS:
        assert form.store(form.smallest) == form.smallest
        assert form.store(form.smallest / 2) == 0  # a tie, and zero is even
        assert form.store(form.smallest * 3 / 4) == form.smallest


@given(value=st.floats(-1e4, 1e4), scale=st.floats(1e-3, 1e3))
def test_int8_rounds_and_saturates_as_numpy_does(value: float, scale: float) -> None:
    form = IntegerFormat("INT8", 8, Fraction(scale))
    stored = form.store(Fraction(value)) / Fraction(scale)
    assert stored.denominator == 1
    if abs(value / scale % 1 - 0.5) > 1e-9:  # off ties the double quotient rounds as the exact one
        assert stored == np.clip(np.rint(value / scale), -128, 127)


def test_ties_between_integers_go_to_the_even_one() -> None:
    form = BY_NAME["INT8"]
    assert [form.store(Fraction(k, 2)) for k in (-3, -1, 1, 3, 5)] == [-2, 0, 0, 2, 2]
    assert [BY_NAME["INT4"].store(Fraction(k)) for k in (-99, -8, 7, 8)] == [-8, -8, 7, 7]
    assert (form.store(math.inf), form.store(-math.inf)) == (127, -128)
    assert math.isnan(form.store(math.nan))


def test_pi_is_what_every_introduction_says() -> None:
    result = numerics(("pi",))
    stored = {entry["name"]: entry for entry in result["values"][0]["stored"]}
    assert stored["FP16"]["stored"] == 3.140625
    assert stored["INT8"]["stored"] == 3.0
    assert stored["INT8"]["error"] == 3 - math.pi
    assert stored["FP8 e4m3"]["stored"] == 3.25
    assert stored["FP16"]["relative_error"] == pytest.approx(abs(3.140625 - math.pi) / math.pi)


def test_a_scale_moves_the_integers_alone() -> None:
    entries = {e["name"]: e for e in numerics(("pi",), scale="0.025")["values"][0]["stored"]}
    assert entries["INT8"]["stored"] == pytest.approx(3.15)  # 126 steps
    assert entries["INT4"]["stored"] == pytest.approx(0.175)  # 7 steps, saturated
    assert entries["FP16"]["stored"] == 3.140625


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", Fraction(1, 10)), ("1e-8", Fraction(1, 10**8)), ("-1/3", Fraction(-1, 3)), ("0x1p-3", Fraction(1, 8)),
     ("π", Fraction(math.pi)), ("-e", Fraction(-math.e)), ("inf", math.inf), ("-Infinity", -math.inf),
     ("1e300", Fraction(10**300)), ("-1e-300", Fraction(-1, 10**300))],
)  # fmt: skip
def test_numbers_are_read_exactly(text: str, value: Any) -> None:
    assert parse(text) == value


def test_minus_zero_keeps_its_sign() -> None:
    for text in ("-0", "-0.0", "-0x0p0"):
        assert math.copysign(1, float(BY_NAME["FP16"].store(parse(text)))) == -1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "1/0",
        "1/2/3",
        "nan/2",
        "0xzz",
        "1e301",
        "1.1e300",
        "9e-301",
        "1e200/1e-200",
        "1e-999999999",
        "0x1p99999",
        "0x1p1000",
    ],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="number"):
        parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "abc", "1e301"])
def test_scales_are_positive(text: str) -> None:
    with pytest.raises(UsageError, match=f"option '--scale': expected a finite number above 0; got {text}; write"):
        parse_scale(text)


@pytest.mark.parametrize("text", ["1e290", "nan", "inf", "-inf", "0", "-0", "1e-290", "1e-290/3"])
def test_every_value_gets_figures(text: str) -> None:
    entries = numerics((text,), scale="1/3")["values"][0]["stored"]
    assert len(entries) == 8
    assert all(entry["error"] is None or math.isfinite(entry["stored"]) for entry in entries)
