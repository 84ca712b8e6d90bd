from __future__ import annotations

import pytest

from qtool.reporting.summary import accuracy_phrase, caveats, size_phrase, speed_phrase, verdicts


def test_a_verdict_says_what_was_gained_and_lost_with_its_doubt(result):
    told = verdicts(result)
    assert list(told) == ["fp16", "int8"]
    assert told["int8"] == (
        "int8 against fp32 (cpu, 1 thread): 4.00x smaller, 2.50x faster (95 % CI 2.45 to 2.55) at batch size 1, "
        "2.50x faster (95 % CI 2.45 to 2.55) at batch size 8; agreement 98.5 %, "
        "top-1 drop 0.30 points (95 % CI −0.40 to 1.00) on 1,000 samples."
    )


def test_no_gain_is_claimed_that_the_interval_does_not_carry(result):
    assert "as fast, 1.00x (95 % CI 0.98 to 1.02)" in verdicts(result)["fp16"]


@pytest.mark.parametrize(
    ("ratio", "bounds", "words"),
    [
        (0.5, [0.4, 0.8], "2.00x slower (95 % CI 1.25 to 2.50) at"),
        (1.05, [1.01, 1.1], "1.05x faster"),
        (1.05, [0.99, 1.1], "as fast"),
        (0.97, [0.9, 1.0], "as fast"),
        (3.0, None, "too few runs"),
    ],
)
def test_speed_is_worded_by_its_interval(ratio, bounds, words):
    assert words in speed_phrase({"speedup": ratio, "speedup_ci95": bounds, "batch_size": 1})


def test_size_is_worded_either_way():
    assert (size_phrase(0.26), size_phrase(1.01), size_phrase(2.0)) == ("3.85x smaller", "as large", "2.00x larger")


def test_accuracy_that_was_not_measured_is_not_spoken_of(result):
    assert accuracy_phrase(None) == accuracy_phrase({}) == ""
    assert accuracy_phrase({"num_samples": 5, "sqnr_db": 30.0}) == "SQNR 30.0 dB on 5 samples"
    assert accuracy_phrase({"num_samples": 5, "sqnr_db": float("inf")}) == "SQNR ∞ dB on 5 samples"
    of_language = {"num_samples": 5, "sqnr_db": 30.0, "metrics": {"perplexity": 9.0}}
    assert accuracy_phrase(of_language) == "SQNR 30.0 dB on 5 tokens"
    del result["variants"]["int8"]["accuracy"]
    assert ";" not in verdicts(result)["int8"]


def test_threads_are_counted(result):
    assert "(cpu, 4 threads)" in verdicts(result | {"threads": 4})["int8"]


def test_caveats_are_the_notes_and_the_noise(result):
    told = caveats(result)
    assert "storage only" in told[0]
    assert told[1] == "noisy machine: a neighbour was loud"
