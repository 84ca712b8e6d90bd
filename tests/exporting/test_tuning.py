"""What tuning decides, with a timer that says what the test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import UsageError
from qtool.exporting import tuning
from qtool.form import Plan, QuantizedModel

Gated = tuple[QuantizedModel, torch.Tensor]
SLOW_STEM = {"0": 9.0}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are made, but nothing is in them: nobody here reads one. So small a net's SQNR may go either way."""
    monkeypatch.setattr(tuning, "sqnr_in_torch", lambda model, samples: 30.0)
    monkeypatch.setattr(tuning, "quantized_to_onnx", lambda *_: None)
    monkeypatch.setattr(tuning, "float_to_onnx", lambda *_: None)
    monkeypatch.setattr(tuning, "save", lambda model, path: path.touch())


def profile(slow: Mapping[str, float]) -> tuning.Profile:
    """Every kernel takes two milliseconds in float and one in integers, but those of ``slow`` take more."""

    def read(path: Path) -> Sequence[tuple[str, float]]:
        names = ("0", "2.body.0.0", "3", "5")
        return [(name, 1e-3 * (slow.get(name, 1.0) if path.name == "untuned.onnx" else 2.0)) for name in names]

    return read


class Race:
    """Gives every file but the first the next of ``speedups``, and keeps what was raced."""

    def __init__(self, *speedups: float) -> None:
        self.speedups, self.raced = list(speedups), list[list[str]]()

    def __call__(self, files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
        assert all(path.is_file() for path in files.values())
        self.raced.append(list(files))
        ratios = [1.0, *(self.speedups.pop(0) for _ in range(len(files) - 1))]
        return {n: {"speedup": r, "speedup_ci95": [r - 0.02, r + 0.02]} for n, r in zip(files, ratios, strict=True)}


def tune(gated: Gated, folder: Path, race: Race, slow: Mapping[str, float]) -> tuple[QuantizedModel, dict[str, Any]]:
    integer = folder / "untuned.onnx"
    integer.touch()
    return tuning.tune(gated[0], integer, 21, [gated[1]], race=race, profile=profile(slow))


def test_a_faster_group_is_reverted_with_its_reason(gated: Gated, tmp_path: Path) -> None:
    race = Race(1.2)
    model, account = tune(gated, tmp_path, race, SLOW_STEM)
    assert race.raced == [["int8", "0"]]
    assert [unit.name for unit in model.plan.float_units] == ["0"]
    assert model.plan.float_units[0].reason == "the file is 1.20x as fast (1.18 to 1.22) with '0' in float"
    (group,) = account["groups"]
    assert group["in_float"]
    assert group["predicted_saving_us"] == pytest.approx(7000, rel=0.01)
    assert account["sqnr_db_after"] >= account["sqnr_db_before"] - tuning.MAX_LOSS_DB


@pytest.mark.parametrize("speedup", [1.015, 0.9])
def test_what_is_not_faster_beyond_doubt_stays(gated: Gated, tmp_path: Path, speedup: float) -> None:
    model, account = tune(gated, tmp_path, Race(speedup), SLOW_STEM)
    assert not model.plan.float_units
    assert "not faster beyond doubt" in account["groups"][0]["reason"]


def test_nothing_promising_is_not_raced(gated: Gated, tmp_path: Path) -> None:
    race = Race()
    model, account = tune(gated, tmp_path, race, {})
    assert model is gated[0]
    assert race.raced == []
    assert account["groups"] == []


def test_two_faster_groups_are_raced_together(gated: Gated, tmp_path: Path) -> None:
    slow = {"0": 9.0, "3": 8.0}
    race = Race(1.2, 1.1, 1.3, 1.2)
    both, _ = tune(gated, tmp_path, race, slow)
    assert race.raced == [["int8", "0", "1"], ["int8", "0", "1"]]
    assert {unit.name for unit in both.plan.float_units} == {"0", "3"}
    one, account = tune(gated, tmp_path, Race(1.2, 1.1, 1.15, 1.2), slow)
    assert len(one.plan.float_units) == 1
    assert "does better alone" in account["groups"][1]["reason"]


def test_a_less_accurate_model_is_refused(gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([30.0, 29.0])
    monkeypatch.setattr(tuning, "sqnr_in_torch", lambda model, samples: next(ratios))
    model, account = tune(gated, tmp_path, Race(1.2), SLOW_STEM)
    assert not model.plan.float_units
    assert "SQNR" in account["groups"][0]["reason"]


def test_all_products_are_never_taken(gated: Gated, tmp_path: Path) -> None:
    race = Race()
    tune(gated, tmp_path, race, {"0": 9.0, "2.body.0.0": 9.0, "3": 9.0, "5": 9.0})
    assert race.raced == []


def test_groups_that_hold_all_products_together_are_not_taken_together(
    gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = tuple(unit.name for unit in gated[0].plan.integer_units)
    groups = [tuning.Group("front", units[:2], 1.0), tuning.Group("back", units[2:], 0.9)]
    monkeypatch.setattr(tuning, "candidates", lambda *_: groups)
    race = Race(1.2, 1.1)
    model, account = tune(gated, tmp_path, race, {})
    assert race.raced == [["int8", "0", "1"]]
    assert tuple(unit.name for unit in model.plan.float_units) == units[:2]
    assert "no other product" in account["groups"][1]["reason"]


def test_what_cannot_be_tuned_is_refused(gated: Gated) -> None:
    with pytest.raises(UsageError, match="'ort-cpu' or 'openvino'"):
        tuning.check(QuantizedModel(gated[0].graph, Plan("tensorrt"), gated[1], gated[0].float_graph))
    with pytest.raises(UsageError, match="float reference"):
        tuning.check(QuantizedModel(gated[0].graph, gated[0].plan, gated[1]))


def test_an_account_is_repeated_without_measuring(gated: Gated, tmp_path: Path) -> None:
    model, account = tune(gated, tmp_path, Race(1.2), SLOW_STEM)
    again = tuning.retune(gated[0], account)
    assert again.plan == model.plan
    assert torch.equal(again(gated[1]), model(gated[1]))
