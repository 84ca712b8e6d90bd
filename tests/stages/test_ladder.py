"""The ladder: rungs on top of each other in fresh processes, the table, the picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import warm

from qtool.errors import UsageError
from qtool.recipe import TrainConfig
from qtool.reporting.ladder import ladder_lines, picture
from qtool.reporting.terminal import show
from qtool.stages import memory
from qtool.stages.ladder import DEFAULT, Ladder, Rung, climb, configs, load_ladder
from qtool.training import rules

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
TEXT = """
[train]
batch_size = 16
max_steps = 3
[[rungs]]
name = "plain"
published = { peak_gb = 0.0002 }
[[rungs]]
name = "too clever"
set = { activation_checkpointing = true }
[[rungs]]
name = "SGD"
set = { optimizer = "sgd", activation_checkpointing = false }
"""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_each_rung_is_predicted_measured_and_trained(
    small_data: str, small_net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_asked", warm.measured)
    (tmp_path / "ladder.toml").write_text(TEXT)
    found = climb(
        tmp_path / "ladder.toml", model=small_net, data=small_data, out=tmp_path / "out", device="cpu", seeds=2
    )
    plain, clever, sgd = found["rungs"]
    assert "a model with repeated blocks" in clever["failed"]
    for rung in (plain, sgd):
        assert abs(rung["error"]) < 0.1  # of a few hundred kilobytes
        assert rung["samples_per_s"] == pytest.approx(16 / rung["seconds_per_step"])
        assert rung["loss"] > 0
        first, second = (run["metrics"] for run in rung["seeds"])
        assert first != second
        assert rung["metrics"] == pytest.approx({name: (first[name] + second[name]) / 2 for name in first})
        assert 0 <= rung["metrics"]["top1"] <= 1
    assert sgd["peak_bytes"] < plain["peak_bytes"]
    assert json.loads((tmp_path / "out" / "ladder.json").read_text())["rungs"] == found["rungs"]
    drawn = ElementTree.fromstring((tmp_path / "out" / "ladder.svg").read_text())
    assert len(drawn.findall(f"{SVG}rect")) == 4
    lines = list(ladder_lines(found))
    assert lines[1].row_count == 3
    assert lines[3].row_count == 3
    assert "means over 2 seeds" in lines[4]
    assert "too clever: --activation-checkpointing" in lines[5]


def test_a_ladder_of_which_no_rung_can_be_taken_fails_as_the_first_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_asked", warm.measured)
    (tmp_path / "ladder.toml").write_text('[[rungs]]\nname = "a"\n[[rungs]]\nname = "b"\nset = { seed = 1 }')
    with pytest.raises(UsageError, match=r"^data 'absent.*': expected a file; got no folder"):
        climb(tmp_path / "ladder.toml", model="resnet", data="idx:absent", out=tmp_path / "out", progress=True)
    assert not (tmp_path / "out").exists()
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in told] == ["a", "a:", "b", "b:"]
    assert told[3] == "b: the same"


def test_figures_are_whole_where_there_is_little_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"predicted_bytes": 23.3e6, "peak_bytes": 1234.5e6, "error": -0.009, "seconds_per_step": 0.0598}
    scores = {"samples_per_s": 1070.0, "loss": 1.94, "metrics": {"top1": 0.1, "top5": 0.52}}
    published = {"peak_gb": 26.84, "minutes": 17.88, "accuracy": 0.9606}
    names = ("8-bit AdamW, stochastic rounding, step in backward, checkpointing", "other")
    rungs = [{"name": name, "published": published, **measured, **scores} for name in names]
    monkeypatch.setenv("COLUMNS", "80")
    show("ladder", {"source": {"model": "m", "data": "d"}, "rungs": rungs})
    told = capsys.readouterr().out
    assert "…" not in told
    rows = [line.split() for line in told.splitlines() if line.startswith("other")]
    assert rows == [
        ["other", "23.3", "1,234", "-0.9%", "59.8", "1,070", "1.94", "0.100", "0.520"],
        ["other", "0.961", "17.9", "26.8"],
    ]


def test_a_ladder_needs_its_batch_and_techniques_named(small_net: str, small_data: str) -> None:
    with pytest.raises(UsageError, match="--memory-budget: expected the techniques themselves"):
        climb(None, model=small_net, data=small_data, memory_budget="1GiB")


def test_changes_add_up() -> None:
    ladder = Ladder({}, TrainConfig(device="cpu"), tuple(Rung(*rung) for rung in DEFAULT))
    made = configs(ladder)
    assert made[0] == TrainConfig(device="cpu")
    last = made[-1]
    assert (last.precision, last.optimizer, last.activation_checkpointing) == ("bf16-true", "adamw8bit", True)
    assert not any(rule.broken(config) for config in made for rule in rules.RULES)


def test_bars_are_as_long_as_peaks() -> None:
    rungs = [
        {"name": "a", "predicted_bytes": 100, "peak_bytes": 200, "published": {}},
        {"name": "<b>", "failed": "no", "published": {"peak_gb": 1e-7}},
    ]
    drawn = ElementTree.fromstring(picture(rungs))
    widths = [float(rect.get("width", 0)) for rect in drawn.findall(f"{SVG}rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    (line,) = drawn.findall(f"{SVG}line")
    assert float(line.get("x1", 0)) == pytest.approx(14 + widths[0], abs=0.1)


def test_what_is_no_ladder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.toml"
    with pytest.raises(UsageError, match="a TOML file"):
        load_ladder(path)
    path.write_text("rung = 1")
    with pytest.raises(UsageError, match="did you mean 'rungs'"):
        load_ladder(path)
    path.write_text("[train]\nmax_steps = 1")
    with pytest.raises(UsageError, match="expected a rung or more; got none"):
        load_ladder(path)
    path.write_text('[[rungs]]\nname = "x"\nset = { optimiser = "sgd" }')
    with pytest.raises(UsageError, match=r"rung 'x', 'optimiser'.*did you mean 'optimizer'"):
        load_ladder(path)
    with pytest.raises(UsageError, match="no model; pass --model"):
        climb(None)


@pytest.mark.parametrize(
    ("rung", "told"),
    [
        ("[[rungs]]", "each have a name"),
        ('[[rungs]]\nname = "a"\nsett = 3', "got 'sett'; did you mean 'set'"),
        ('[rungs]\nname = "a"', "each have a name"),
    ],
)
def test_a_rung_that_is_not_understood_is_told(rung: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "l.toml").write_text(rung)
    with pytest.raises(UsageError, match=told):
        load_ladder(tmp_path / "l.toml")
