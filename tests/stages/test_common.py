"""What stages share: how far something is, told in a terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
import rich.progress

from qtool.artifacts import mark_stale, staging, write_result
from qtool.stages.common import finished, meter, tidy


def test_a_long_description_leaves_the_count_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "60", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with meter(True, "train") as report:
        report("[/predicting] " + 5 * "--activation-checkpointing ", 2, 48)
        time.sleep(0.3)  # it is drawn ten times a second
    assert "2/48" in shown.getvalue()
    assert "[/predicting]" in shown.getvalue()  # no markup
    assert shown.getvalue().count("--activation-checkpointing") >= 5


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_notebook_shows_a_bar_as_a_terminal_does(in_notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
    monkeypatch.setattr("qtool.system.quiet.find_spec", lambda name: name)  # ipywidgets is there
    monkeypatch.setattr(rich.progress.Progress, "start", lambda bar: shown.append(not bar.disable))
    with meter(True, "train"):
        pass
    assert shown == [in_notebook]


def test_a_notebook_without_ipywidgets_shows_a_bar_and_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would give the advice, a warning, each time that the bar moves, and no bar."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():  # as ipykernel has them
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("qtool.system.quiet.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with meter(True, "quantize") as report:
        report("ranges", 1, 3)
        time.sleep(0.3)  # it is drawn ten times a second
    assert "1/3" in shown.getvalue()


def test_a_function_takes_lines_and_silence_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    for wanted in (told.append, False):
        with meter(wanted, "train") as report:
            report("predicting", 2, 48)
    assert told == ["train: predicting (2 of 48)"]
    assert capsys.readouterr() == ("", "")


def test_what_another_process_has_tidied_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that fail together one is first to take the folder away."""
    monkeypatch.setattr(Path, "is_dir", lambda folder: True)  # it was there a moment ago
    with pytest.raises(ValueError, match="the cause"), tidy(tmp_path / "run"):
        raise ValueError("the cause")


def test_a_stage_says_that_it_is_finished_or_what_has_changed(tmp_path: Path) -> None:
    config, inputs, told = {"epochs": 2, "qat": {"lr": 0.1}}, {"model": "tiny"}, list[str]()
    with staging(tmp_path, "train") as folder:
        (folder / "weights").write_text("w")
        outputs = {"model": folder / "weights"}
        write_result(tmp_path, "train", config=config, inputs=inputs, outputs=outputs, metrics={})
    assert finished(tmp_path, "train", config, inputs, told.append)
    assert finished(tmp_path, "train", config | {"since_then": None}, inputs)
    other = {"epochs": 2, "qat": {"lr": 0.2}}
    assert not finished(tmp_path, "train", other, {"model": "large", "data": "x"}, told.append)
    (tmp_path / "weights").rename(tmp_path / "elsewhere")
    assert not finished(tmp_path, "train", config, inputs, told.append)
    mark_stale(tmp_path, "train", "a gate failed")
    assert not finished(tmp_path, "train", config, inputs, told.append)
    assert not finished(tmp_path, "export", config, inputs, told.append)
    assert told == [
        f"train: as it is in '{tmp_path}', finished with the same settings",
        "train: again, since model, data, qat.lr changed",
        "train: again, since 'weights' is gone",
        "train: again, since a gate failed",
    ]


@pytest.mark.parametrize("text", ["{", '{"schema": 0}', "[]"])
def test_a_stage_whose_result_cannot_be_read_is_done_again_as_its_error_says(tmp_path: Path, text: str) -> None:
    with staging(tmp_path, "train"):
        write_result(tmp_path, "train", config={"a": 1}, inputs={"data": "x"}, outputs={}, metrics={})
    assert finished(tmp_path, "train", {"a": 1}, {"data": "x"})
    (tmp_path / "train.json").write_text(text)
    assert not finished(tmp_path, "train", {"a": 1}, {"data": "x"})
