"""Calibration: one pass over batches, nothing kept of them, ranges chosen, saved and repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qtool.errors import QtoolError
from qtool.quantization.calibration.calibrate import calibrate, choose_ranges, restore_ranges
from qtool.quantization.capturing.capture import capture
from qtool.quantization.engines import pt2e
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import ORT_CPU
from qtool.recipe import RANGES, QuantizeConfig

X = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def prepared(detailed: bool = True) -> GraphModule:
    return both(detailed)[0]


def both(detailed: bool = True) -> tuple[GraphModule, Placement]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    graph = capture(model, X)
    placement = Placement(graph, ORT_CPU)
    return pt2e.prepare(graph, placement, detailed=detailed), placement


def test_every_sample_is_counted_once_and_batches_do_not_matter() -> None:
    states = []
    for size in (1, 5, 24):
        graph, placement = both()
        assert calibrate(graph, X.split(size)) == 24
        states.append(choose_ranges(pt2e.observers(graph, placement), QuantizeConfig(ranges="mse")))
    assert states[0]["input_1"] == states[1]["input_1"] == states[2]["input_1"]
    for name in states[0]:
        assert states[1][name]["low"] == pytest.approx(states[2][name]["low"], rel=1e-5, abs=1e-6)
        assert states[1][name]["high"] == pytest.approx(states[2][name]["high"], rel=1e-5)


def test_rows_of_tokens_count_as_those_of_their_sample() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(20, 50, 16)
    for target in ("ort-cpu", "openvino"):  # one of which multiplies matrices of samples × tokens
        config = QuantizeConfig(target=target, ranges="moving-average", algorithms=None)
        range_ = quantize(model, config, example=x, calibration=x.split(10)).ranges["input_1"]
        assert range_["low"] == pytest.approx(float(x.amin((1, 2)).mean()), rel=1e-3)
        assert range_["high"] == pytest.approx(float(x.amax((1, 2)).mean()), rel=1e-3)


def test_batches_are_taken_from_any_iterable_one_at_a_time() -> None:
    alive = []

    def batches() -> Iterator[Tensor]:
        for batch in X.split(8):
            alive.append(1)
            yield batch

    assert calibrate(prepared(), batches()) == 24
    assert len(alive) == 3


def test_minmax_ranges_are_the_extremes() -> None:
    graph, placement = both(detailed=False)
    calibrate(graph, [X])
    ranges = choose_ranges(pt2e.observers(graph, placement), QuantizeConfig(ranges="minmax"))
    assert (ranges["input_1"]["low"], ranges["input_1"]["high"]) == (float(X.min()), float(X.max()))
    assert ranges["0"]["low"] == 0.0  # after the relu
    assert {entry["method"] for entry in ranges.values()} == {"minmax"}


@pytest.mark.parametrize("method", RANGES)
def test_each_estimator_is_asked_and_saved_ranges_repeat_it(method: str) -> None:
    graph, placement = both()
    calibrate(graph, [X])
    first = pt2e.observers(graph, placement)
    ranges = choose_ranges(first, QuantizeConfig(ranges=method, percentile=90.0))
    again = pt2e.observers(*both())
    restore_ranges(again, ranges, "here")
    for name, observer in first.items():
        low, high = ranges[name]["low"], ranges[name]["high"]
        assert observer.chosen == again[name].chosen == (low, high)
        for one, other in zip(observer.calculate_qparams(), again[name].calculate_qparams(), strict=True):
            assert torch.equal(one, other)
        np.testing.assert_array_equal(observer.histogram.counts, again[name].histogram.counts)
    if method == "percentile":
        assert ranges["input_1"]["high"] < float(X.max())


def test_a_range_that_is_missing_is_named() -> None:
    graph, placement = both()
    calibrate(graph, [X])
    ranges = choose_ranges(pt2e.observers(graph, placement), QuantizeConfig())
    del ranges["0"]
    with pytest.raises(QtoolError, match=r"runs/x/ranges\.json: expected a range for '0'; got ranges for"):
        restore_ranges(pt2e.observers(*both()), ranges, "runs/x/ranges.json")


@pytest.mark.parametrize("batches", [[], [X[:0]], iter([])])
def test_no_sample_is_an_error(batches: Any) -> None:
    with pytest.raises(QtoolError, match=r"calibration: expected at least one sample; got none"):
        calibrate(prepared(), batches)


@pytest.mark.parametrize(
    ("batch", "got"),
    [(X[:, :1], "24 × 1 × 6 × 6"), (X[:, :, :5], "24 × 3 × 5 × 6"), (X[:, None], "24 × 1 × 3"), (X.int(), "int32")],
)
def test_a_batch_of_another_size_is_told_with_its_place(batch: Tensor, got: str) -> None:
    said = rf"calibration batch 1, 'input': expected float32 of N × 3 × 6 × 6; got .*{got}"
    with pytest.raises(QtoolError, match=said):
        calibrate(prepared(), [X, batch])


def test_a_value_that_is_not_finite_is_told_with_its_layer() -> None:
    graph, placement = both()
    pt2e.observers(graph, placement)
    with torch.no_grad():
        graph.get_parameter("0.bias")[1] = float("inf")
    with pytest.raises(QtoolError, match=r"layer '0': expected finite values; got infinity"):
        calibrate(graph, [X])
