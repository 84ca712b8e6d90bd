"""Where variants stand in the chart of accuracy, time and size."""

from __future__ import annotations

import json

import pytest

from qtool.reporting import variants
from qtool.reporting.gather import gather


def points(run):
    return {point.name: point for point in variants.points(run, variants.own_metric(run))}


def test_a_variants_place_on_the_frontier_is_its_time_and_score_within_their_intervals(finished_run):
    point = points(gather(finished_run / "ptq"))["int8"]
    assert point.time == pytest.approx(1 / 2.5)
    assert point.time_bounds == pytest.approx((1 / 2.55, 1 / 2.45))
    assert point.score == 0.897
    assert point.score_bounds == pytest.approx((0.890, 0.904))  # FP32's 0.9 less 0.010 and plus 0.004
    assert point.score_bounds[0] < point.score < point.score_bounds[1]


def test_of_several_variants_the_float_files_are_shown_once(finished_run):
    found = points(gather(finished_run))
    assert list(found) == ["fp32", "fp16", "int8 ptq", "int8 qat"]
    assert found["fp32"].time == 1.0
    assert found["fp32"].time_bounds is found["fp32"].score_bounds is None


def test_without_labels_agreement_takes_the_place_of_accuracy(finished_run, result):
    for entry in result["variants"].values():
        entry["accuracy"] = {"num_samples": 10, "agreement": entry["accuracy"]["agreement"]}
    path = finished_run / "ptq" / "benchmark.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": result}))
    run = gather(finished_run / "ptq")
    assert points(run)["int8"].score == 0.985
    assert "agreement, %" in variants.frontier(run)


def test_a_metric_of_its_own_is_drawn_and_less_may_be_better(finished_run, result):
    for name, value in (("fp32", 0.24), ("fp16", 0.24), ("int8", 0.25)):
        told = {"metric": "mae", "higher_is_better": False, "metrics": {"mae": value}}
        result["variants"][name]["accuracy"] |= told | {"metrics_reference": {"mae": 0.24}}
    result["variants"]["int8"]["accuracy"]["metric_change_ci95"] = (-0.002, 0.03)
    path = finished_run / "ptq" / "benchmark.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": result}))
    run = gather(finished_run / "ptq")
    found = points(run)
    assert (found["fp32"].score, found["int8"].score) == (0.24, 0.25)
    assert found["int8"].score_bounds == pytest.approx((0.238, 0.27))
    assert found["fp32"].score_bounds is None
    drawn = str(variants.frontier(run))
    assert ">mae<" in drawn
    assert "Lower and further left" in drawn
    del result["variants"]["fp16"]["accuracy"]["metrics"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": result}))
    assert "top-1, %" in variants.frontier(gather(finished_run / "ptq"))
