"""Folders for temporary files: gone when closed, and after a kill with the next one that is made."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qtool.system.temporary import Folder

HOLD = """
import tempfile
tempfile.tempdir = {place!r}
from qtool.system.temporary import Folder
folder = Folder("of-another")
(folder.path / "value").write_text("1")
print(folder.path.name, flush=True)
input()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holding(place: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a folder, and what that is called."""
    code = HOLD.format(place=str(place))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_a_folder_is_gone_when_it_is_closed(place: Path) -> None:
    with Folder("values") as path:
        assert path.parent == place
        assert path.name.startswith("qtool-values-")
        (path / "value").write_text("1")
    assert not names(place)


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_others_hold_is_not(place: Path) -> None:
    (place / "qtool-of-the-user").mkdir()
    with Folder("own") as own:
        killed, left = holding(place)
        living, held = holding(place)
        with killed, living:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            assert left in names(place)
            Folder("next").close()
            assert names(place) == {"qtool-of-the-user", own.name, held}
            living.communicate("\n")
    assert names(place) == {"qtool-of-the-user"}
