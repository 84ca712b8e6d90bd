"""What stages share: how far something is, told in a terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
import rich.progress

from qtool.stages.common import meter, tidy


def test_a_long_description_leaves_the_count_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "60", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with meter(True, "train") as report:
        report("predicting " + 5 * "--activation-checkpointing ", 2, 48)
        time.sleep(0.3)  # it is drawn ten times a second
    assert "2/48" in shown.getvalue()
    assert shown.getvalue().count("--activation-checkpointing") >= 5


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_notebook_shows_a_bar_as_a_terminal_does(in_notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
    monkeypatch.setattr(rich.progress.Progress, "start", lambda bar: shown.append(not bar.disable))
    with meter(True, "train"):
        pass
    assert shown == [in_notebook]


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
