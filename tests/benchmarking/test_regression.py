from __future__ import annotations

import copy
import json
import math
import re

import pytest

from qtool.benchmarking.regression import (
    compare_with,
    differences,
    read_benchmark,
    regressions,
    require_no_regression,
)
from qtool.errors import ContractError, QtoolError, UsageError


def entry(**changes):
    timed = {
        "batch_size": 1, "latency_p50_ms": 2.0, "speedup": 2.5, "speedup_ci95": [2.45, 2.55], "spread": 0.01,
    }  # fmt: skip
    base = {
        "size_stripped_mib": 1.0, "peak_memory_mib": 20.0, "arithmetic": {"int8": 5}, "latency": [timed],
        "accuracy": {
            "num_samples": 1000, "top1": 0.9, "agreement": 0.98, "sqnr_db": 30.0,
            "metric": "mae", "higher_is_better": False, "metrics": {"mae": 0.4},
        },
    }  # fmt: skip
    for path, value in changes.items():
        place = base
        *parents, last = path.split("__")
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return base


def result(noisy=False, cpu="A", **changes):
    return {
        "provider": "cpu", "device": "cpu", "threads": 1, "reference": "fp32", "cpu": {"name": cpu},
        "noise": {"noisy": noisy}, "variants": {"int8": entry(**changes)},
    }  # fmt: skip


RATIO = "latency__0__speedup_ci95"


def figures(new, old=None, tolerance=0.05):
    return [r.figure for r in regressions(old or result(), new, tolerance)]


def test_what_was_not_compared_is_told():
    new = result(accuracy__num_samples=50, latency__0__batch_size=4)
    assert figures(new) == []
    assert differences(result(), new) == [
        "outputs of 1,000 samples then, of 50 now: they were not compared",
        "batch size 1 was timed only then: speed was not compared there",
        "batch size 4 was timed only now: speed was not compared there",
    ]
    assert differences(result(), result()) == []


def test_the_same_is_no_regression():
    assert figures(result()) == []


@pytest.mark.parametrize(
    ("worse", "just_as_good", "figure"),
    [
        ({"size_stripped_mib": 1.011}, {"size_stripped_mib": 1.009}, "size, MiB"),
        ({"peak_memory_mib": 23.1}, {"peak_memory_mib": 22.9}, "peak memory, MiB"),
        ({RATIO: [2.2, 2.32]}, {RATIO: [2.2, 2.33]}, "speed-up at batch size 1"),
        ({"latency__0__latency_p50_ms": 2.17}, {"latency__0__latency_p50_ms": 2.15}, "latency p50 at batch size 1, ms"),
        ({"accuracy__top1": 0.894}, {"accuracy__top1": 0.896}, "top-1"),
        ({"accuracy__agreement": 0.974}, {"accuracy__agreement": 0.976}, "agreement"),
        ({"accuracy__sqnr_db": 29.4}, {"accuracy__sqnr_db": 29.6}, "SQNR, dB"),
        ({"accuracy__metrics": {"mae": 0.405}}, {"accuracy__metrics": {"mae": 0.403}}, "mae"),
        ({"arithmetic": {"int8": 4, "float32": 1}}, {"arithmetic": {"int8": 9}}, "share of INT8 operations"),
    ],
)  # fmt: skip
def test_each_figure_has_its_limit(worse, just_as_good, figure):
    assert figures(result(**worse)) == [figure]
    assert figures(result(**just_as_good)) == []


def test_a_task_s_metric_is_worse_in_its_own_direction():
    higher = {"accuracy__metric": "f1", "accuracy__higher_is_better": True}
    old = result(**higher, accuracy__metrics={"f1": 0.8})
    assert figures(result(**higher, accuracy__metrics={"f1": 0.791}), old) == ["f1"]
    assert figures(result(**higher, accuracy__metrics={"f1": 0.793}), old) == []
    assert figures(result(**higher, accuracy__metrics={"f1": 0.9}), old) == []
    assert figures(result(), old) == []  # of another task


def test_better_is_never_worse():
    better = result(
        size_stripped_mib=0.5, peak_memory_mib=10.0, latency__0__latency_p50_ms=1.0,
        latency__0__speedup_ci95=[4.9, 5.1], accuracy__top1=0.95, accuracy__sqnr_db=40.0,
    )  # fmt: skip
    assert figures(better) == []


def test_a_wider_tolerance_forgives():
    slower = result(latency__0__speedup_ci95=[2.2, 2.3])
    assert figures(slower, tolerance=0.05)
    assert not figures(slower, tolerance=0.1)


SLOW = {"latency__0__latency_p50_ms": 9.0, "peak_memory_mib": 99.0}


@pytest.mark.parametrize(
    ("new", "words"),
    [(result(noisy=True, latency__0__latency_p50_ms=9.0), "noisy machine"), (result(cpu="B", **SLOW), "another CPU")],
)
def test_times_are_not_compared_where_they_cannot_be(new, words):
    assert figures(new) == []
    assert any(words in note for note in differences(result(), new))


def test_speed_is_not_compared_between_different_settings():
    other = result(latency__0__speedup_ci95=[1.0, 1.1], **SLOW) | {"threads": 2}
    assert figures(other) == []
    assert differences(result(), other) == ["threads: 1 then, 2 now; speed was not compared"]


def test_what_is_measured_against_another_reference_is_not_compared():
    alone = result(accuracy__agreement=1.0, accuracy__sqnr_db=math.inf) | {"reference": "int8"}
    assert figures(result(), alone) == []
    assert figures(result(accuracy__top1=0.1), alone) == ["top-1"]
    told = "reference: int8 then, fp32 now; speed-ups, agreement and SQNR were not compared"
    assert differences(alone, result()) == [told]


def test_another_test_set_is_another_question():
    assert figures(result(accuracy__num_samples=500, accuracy__top1=0.1)) == []


def test_what_is_unknown_in_one_is_not_compared():
    assert figures(result(peak_memory_mib=None, accuracy=None, latency__0__speedup_ci95=None)) == []
    assert figures(result(), result(accuracy=None, peak_memory_mib=None)) == []


def test_batch_sizes_are_matched():
    new = result(latency__0__speedup_ci95=[1.0, 1.1])
    new["variants"]["int8"]["latency"][0]["batch_size"] = 8
    assert figures(new) == []


@pytest.fixture
def old_file(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, "stage": "benchmark", "metrics": result()}))
    return path


def compared(path, new):
    return new | {"comparison": compare_with(path, read_benchmark(path), new, 0.05)}


def test_a_regression_breaks_the_contract_and_is_told_with_both_values(old_file):
    worse = compared(old_file, result(accuracy__top1=0.88, size_stripped_mib=1.2))
    assert [r["figure"] for r in worse["comparison"]["regressions"]] == ["size, MiB", "top-1"]
    with pytest.raises(ContractError) as caught:
        require_no_regression(worse)
    assert caught.value.exit_code == 3
    assert "int8: size, MiB 1.2, was 1 (limit 1.01); int8: top-1 0.88, was 0.9" in str(caught.value)


def test_no_regression_passes_and_keeps_the_notes(old_file):
    require_no_regression(result())
    same = compared(old_file, result())
    require_no_regression(same)
    assert json.loads(json.dumps(same))["comparison"]["notes"] == []
    two = copy.deepcopy(result())
    two["variants"]["fp32"] = entry()
    old_file.write_text(json.dumps(two))
    assert compared(old_file, result())["comparison"]["notes"] == ["fp32 was measured then and not now"]


def test_what_was_printed_of_a_slower_file_is_compared_with(tmp_path):
    path = tmp_path / "printed.json"
    path.write_text(json.dumps({"error": {"where": "int8", "exit_code": 3, "details": result()}}))
    assert read_benchmark(path) == result()


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"variants": 3}', '{"metrics": 3}', '{"error": {"where": "x"}}', '{"error": "x"}']
)
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(QtoolError, match=r"benchmark\.json"):
        read_benchmark(path)
    with pytest.raises(UsageError, match="got no such file; give"):
        read_benchmark(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="got a folder; give"):
        read_benchmark(tmp_path)


@pytest.mark.parametrize("path", ["cpu", "noise.noisy", "variants.int8.latency", "variants.int8.latency[0].spread"])
def test_a_file_without_what_is_compared_is_refused(old_file, path):
    figures = result()
    *parents, last = path.replace("[0]", ".0").split(".")
    place = figures
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    del place[last]
    old_file.write_text(json.dumps(figures))
    with pytest.raises(QtoolError, match=re.escape(f"JSON without {path}; give one")):
        read_benchmark(old_file)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cpu__name", 3), ("variants__int8__latency", {}), ("variants__int8__latency__0__spread", None),
        ("variants__int8__latency__0__speedup_ci95", [1.0]), ("variants__int8__accuracy", [1]),
        ("variants__int8__accuracy__top1", "0.9"), ("variants__int8__size_stripped_mib", "1"),
        ("variants__int8__arithmetic", 5), ("variants__int8__accuracy__metrics__mae", "x"),
        ("variants__int8__size_stripped_mib", math.nan), ("variants__int8__accuracy__top1", math.inf),
        ("variants__int8__accuracy__sqnr_db", math.nan),
        pytest.param("variants__int8__peak_memory_mib", 10**400, id="more than floats hold"),
    ],
)  # fmt: skip
def test_a_file_with_another_kind_of_thing_in_it_is_refused(old_file, path, value):
    figures = result()
    *parents, last = path.split("__")
    place = figures
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[last] = value
    old_file.write_text(json.dumps(figures))
    told = path.replace("__0", "[0]").replace("__", ".")
    with pytest.raises(QtoolError, match=re.escape(f"JSON with {str(value)[:20]!r} as {told}; give one")):
        read_benchmark(old_file)


def test_outputs_that_are_no_longer_equal_are_worse(old_file):
    """An infinite SQNR was null in JSON of earlier versions."""
    equal = result(accuracy__sqnr_db=None, accuracy__agreement=1.0)
    old_file.write_text(json.dumps(equal))
    assert figures(result(accuracy__sqnr_db=90.0, accuracy__agreement=1.0), read_benchmark(old_file)) == ["SQNR, dB"]
    assert figures(result(accuracy__sqnr_db=math.inf, accuracy__agreement=1.0), equal) == []
    assert figures(result(accuracy__sqnr_db=-math.inf), result(accuracy__sqnr_db=None)) == [], "it was as bad"


def test_a_metric_that_is_undefined_now_is_worse(old_file):
    assert figures(result(accuracy__metrics={"mae": math.nan})) == ["mae"]
    old_file.write_text(json.dumps(result(accuracy__metrics={"mae": None})))
    assert figures(result(accuracy__metrics={"mae": math.nan}), read_benchmark(old_file)) == []


def test_nothing_in_common_is_an_error(old_file):
    other = result()
    other["variants"] = {"mine": entry()}
    with pytest.raises(QtoolError, match="like with like"):
        compared(old_file, other)


def test_figures_of_another_model_are_no_measure(old_file):
    old_file.write_text(json.dumps(result() | {"model": "/there/net.py:build"}))
    assert compared(old_file, result() | {"model": "/here/net.py:build"})["comparison"]["regressions"] == []
    with pytest.raises(QtoolError, match="of the model 'resnet'; got those of 'net"):
        compared(old_file, result() | {"model": "resnet"})


def test_outputs_on_other_data_are_not_compared():
    worse = result(accuracy__top1=0.1) | {"data": "b"}
    assert figures(worse, result() | {"data": "b"}) == ["top-1"]
    assert figures(worse, result() | {"data": "a"}) == []
    assert "other test data: outputs were not compared" in differences(result() | {"data": "a"}, worse)
