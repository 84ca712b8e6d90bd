"""Scale and zero point against torch.ao, bit for bit, and against the formula in numpy float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from qtool.errors import QtoolError
from qtool.quantization.quantizers.qparams import (
    EPSILON,
    LEAST,
    affine_qparams,
    affine_qparams_of,
    symmetric_qparams,
    weight_step,
)

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
INTEGERS = [(0, 255), (-128, 127), (0, 127), (0, 15), (-8, 7)]
pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning:torch")


@pytest.mark.parametrize(("qmin", "qmax"), INTEGERS)
@given(ends=st.tuples(FLOATS, FLOATS))
def test_affine_equals_torch_ao_bit_for_bit(qmin, qmax, ends):
    dtype = torch.qint8 if qmin < 0 else torch.quint8
    observer = MinMaxObserver(
        dtype=dtype,
        qscheme=torch.per_tensor_affine,
        quant_min=qmin,
        quant_max=qmax,
        eps=LEAST if any(ends) else EPSILON,
    )
    observer(torch.tensor(ends))
    scale, zero_point = observer.calculate_qparams()
    assert affine_qparams(min(ends), max(ends), qmin, qmax) == (scale.item(), zero_point.item())


@given(st.lists(st.lists(FLOATS, min_size=2, max_size=4), min_size=1, max_size=5))
def test_symmetric_equals_torch_ao_bit_for_bit(rows):
    weight = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    for qmax in (127, 63, 7):
        observer = PerChannelMinMaxObserver(
            ch_axis=0,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-qmax,
            quant_max=qmax,
            eps=LEAST,
        )
        observer(weight)
        scale, _ = observer.calculate_qparams()
        scale[(weight == 0).all(1)] = EPSILON
        torch.testing.assert_close(symmetric_qparams(weight.abs().amax(1), qmax), scale, rtol=0, atol=0)


@pytest.mark.parametrize(("qmin", "qmax"), INTEGERS)
@given(ends=st.tuples(FLOATS, FLOATS))
def test_affine_is_the_formula_in_float32(qmin, qmax, ends):
    low, high = (np.float32(min(*ends, 0.0)), np.float32(max(*ends, 0.0)))
    step = (high - low) / np.float32(qmax - qmin)
    expected = max(step, np.float32(LEAST)) if step else np.float32(EPSILON)
    scale, zero_point = affine_qparams(min(ends), max(ends), qmin, qmax)
    assert scale == float(expected)
    assert zero_point == min(max(qmin - int(np.round(low / expected)), qmin), qmax)


@given(st.tuples(FLOATS, FLOATS))
def test_the_grid_covers_the_range_and_holds_zero(ends):
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    assume(high - low > 1e-3)
    scale, zero_point = affine_qparams(low, high)
    least, most = (0 - zero_point) * scale, (255 - zero_point) * scale
    half = scale / 2 * 1.001
    assert abs(least - low) <= half
    assert abs(most - high) <= half
    for wrong in (scale * 1.05, scale / 1.05):  # what a wrong scale would do to the wider side
        assert max(abs(-zero_point * wrong - low), abs((255 - zero_point) * wrong - high)) > half


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6))
def test_many_ranges_at_once_equal_one_at_a_time(ranges):
    low, high = torch.tensor([min(r) for r in ranges]), torch.tensor([max(r) for r in ranges])
    scales, zero_points = affine_qparams_of(low, high, -128, 127)
    assert (scales.dtype, zero_points.dtype) == (torch.float32, torch.int32)
    together = list(zip(scales.tolist(), zero_points.tolist(), strict=True))
    assert together == [affine_qparams(min(r), max(r), -128, 127) for r in ranges]


def test_known_values():
    assert affine_qparams(0.0, 255.0) == (1.0, 0)
    assert affine_qparams(-128.0, 127.0) == (1.0, 128)
    assert affine_qparams(2.0, 255.0) == (1.0, 0)  # widened to 0
    assert affine_qparams(-51.0, -10.0) == (float(np.float32(0.2)), 255)
    assert symmetric_qparams(127.0) == 1.0
    assert symmetric_qparams(7.0, 7) == 1.0


def test_no_width_gives_the_least_scale():
    assert affine_qparams(0.0, 0.0) == (EPSILON, 0)
    assert affine_qparams(0.0, 0.0, -128, 127) == (EPSILON, -128)
    assert symmetric_qparams(0.0) == EPSILON
    ends = torch.tensor([0.0, 1e-30, -1e-30, 8.0, -8.0])
    torch.testing.assert_close(weight_step(ends, -8, 7), torch.tensor([EPSILON, -LEAST, LEAST, -1.0, 1.0]))
    torch.testing.assert_close(weight_step(ends, -8, 8), torch.tensor([EPSILON, LEAST, LEAST, 1.0, 1.0]))
    torch.testing.assert_close(
        symmetric_qparams(torch.tensor([0.0, 1e-30, 127e-9, 127.0])), torch.tensor([EPSILON, LEAST, 1e-9, 1])
    )


@pytest.mark.parametrize(
    "ends", [(math.inf, -math.inf), (1.0, 0.5), (math.nan, 1.0), (0.0, math.inf), (-3e38, 3e38), (0.0, 1e39)]
)
def test_a_range_that_is_none_is_refused(ends):
    with pytest.raises(QtoolError, match="layer 'a': expected"):
        affine_qparams(*ends, where="layer 'a'")


def test_the_bad_channel_is_named():
    with pytest.raises(QtoolError, match=r"conv1: expected finite amax >= 0; got nan in channel 2"):
        symmetric_qparams(torch.tensor([1.0, 2.0, math.nan]), where="conv1")
    with pytest.raises(QtoolError, match="expected finite amax"):
        symmetric_qparams(-1.0)
    with pytest.raises(QtoolError, match=r"got 2\.0, 1\.0 in channel 1"):
        affine_qparams_of(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0]))
