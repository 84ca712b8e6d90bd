"""What a candidate loses against what it costs: the frontier by hand, and what the picture names."""

from __future__ import annotations

import re

import pytest

from qtool.reporting.contracts import advice, contract_markdown, contract_sentence, tradeoffs
from qtool.reporting.tradeoff import Candidate, frontier, tradeoff

POINTS = [
    Candidate("small", 1.0, 3.0, (2.5, 3.5)), Candidate("middle", 2.0, 1.0), Candidate("worse", 2.5, 1.2),
    Candidate("large", 4.0, 0.5),
]  # fmt: skip


def test_the_frontier_is_what_none_beats_in_both() -> None:
    assert [c.name for c in frontier(POINTS)] == ["small", "middle", "large"]
    assert [c.name for c in frontier(POINTS, more_is_better=True)] == ["small"]


def test_the_picture_names_the_frontier_and_the_limit_lies_where_it_should() -> None:
    picture = tradeoff(POINTS, 0.75, "size, MiB", "drop, points")
    assert re.findall(r'class="name">([^<]*)', picture) == ["small", "middle", "large"]
    heights = dict(re.findall(r"<title>(\w+): [^<]*</title>(?:<line[^>]*>)?<circle[^>]*cy=\"([\d.]+)", picture))
    limit = float(re.search(r'y1="([\d.]+)"[^>]*class="limit"', picture)[1])  # type: ignore[index]
    assert float(heights["large"]) > limit > float(heights["middle"])  # a screen's y grows downwards
    assert picture.count("whisker") == 1


def test_what_is_far_beyond_is_counted_and_squeezes_nothing() -> None:
    def drawn(points: list[Candidate], limit: float, **more: bool) -> tuple[str, list[float]]:
        picture = str(tradeoff(points, limit, "size, MiB", "KL, nats", **more))
        return picture, [float(y) for y in re.findall(r'<circle[^>]*cy="([\d.]+)', picture)]

    plain, near = drawn(POINTS, 0.75)
    picture, heights = drawn([*POINTS, Candidate("far", 1.5, 900.0, (600.0, 1200.0))], 0.75)
    assert heights == near
    assert "beyond" not in plain
    assert ">1 candidate far beyond<" in picture
    below, _ = drawn([Candidate("a", 1.0, 99.0), Candidate("b", 2.0, 20.0)], 99.5, more_is_better=True)
    assert ">1 candidate far beyond<" in below


def test_a_name_takes_the_room_there_is() -> None:
    long = " + ".join(["ranges network", "smooth", "equalize", "analytic-bias", "gptq", "steps"] * 2)
    picture = str(tradeoff([Candidate(long, 1.0, 1.0), Candidate(long, 3.0, 0.9)], 0.5, "size, MiB", "KL, nats"))
    names = re.findall(r'class="name">([^<]*)', picture)
    assert [name.endswith("…") for name in names] == [True, True]
    heights = re.findall(r'y="([\d.]+)"[^>]*class="name"', picture)
    assert abs(float(heights[0]) - float(heights[1])) >= 14


def outcome(**changes: object) -> dict[str, object]:
    criterion = {"name": "agreement", "limit": 99.0, "value": 98.0, "ci95": [97.0, 98.8], "met": False, "needed": None}
    trials = [
        {"name": f"trial {i}", "criteria": [criterion | {"value": 95.0 + i}], "size_bytes": 2**20 * i, "speedup": speed,
         "num_float_units": i}
        for i, speed in ((1, 2.0), (2, None), (3, 1.5))
    ]  # fmt: skip
    return {
        "met": False, "chosen": "trial 3", "method": "auto", "criteria": [criterion], "num_samples": 500,
        "trials": trials,
        "frontier": ["trial 1"], "harmful": [{"name": "a.0", "sqnr_db": 3.0}, {"name": "b", "sqnr_db": None}],
    } | changes  # fmt: skip


def test_nothing_lost_is_not_less_than_nothing() -> None:
    criterion = {"name": "drop", "limit": 1.0, "value": -0.0, "ci95": [-0.0, 0.2], "met": True, "needed": None}
    assert "measured 0 (95 % CI 0 to 0.2)" in contract_sentence(outcome(criteria=[criterion]))


def test_a_drop_is_one_of_the_metric_that_is_recorded() -> None:
    criterion = {"name": "drop", "limit": 20.0, "value": 3.0, "ci95": [1.0, 5.0], "met": True, "needed": None}
    trial = {"name": "a", "criteria": [criterion], "size_bytes": 1, "speedup": None, "num_float_units": 0}
    told = outcome(criteria=[criterion], trials=[trial], met=True, metric="recall")
    assert "'trial 3': drop of recall ≤ 20 points, measured 3 (" in contract_sentence(told)
    assert "| candidate | drop of recall, points |" in contract_markdown(told)
    assert "'trial 3': rise of loss ≤ 20 points" in contract_sentence(
        told | {"metric": "loss", "higher_is_better": False}
    )
    assert "drop ≤ 20 points" in contract_sentence(told | {"metric": None})


def test_a_contract_that_was_not_kept_in_pictures_words_and_markdown() -> None:
    size, time = (str(picture) for picture, _ in tradeoffs(outcome()))
    assert size.count("<circle") == 3
    assert time.count("<circle") == 2  # one was not timed
    assert "limit 99" in size
    text = contract_markdown(outcome())
    assert text.startswith("contract not kept; closest is 'trial 3': agreement ≥ 99 %")
    assert "Most harm comes from a.0, b. Promise less" in text
    assert text.count("\n| trial ") == 3


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "Promise less, give labelled training data, or look"),
        ({"method": "ptq"}, "Promise less, allow more by --method auto, or look"),
        ({"trained": True}, "Promise less, or look at those units"),
        ({"out_of_time": True}, "the search goes on where it stopped"),
        ({"criteria": [{"met": None, "needed": 7000}]}, "the samples are too few to tell: give about 7,000"),
    ],
)
def test_the_advice_is_that_of_the_error(changes: dict[str, object], part: str) -> None:
    assert part in advice(outcome(**changes))
