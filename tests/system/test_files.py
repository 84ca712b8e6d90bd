"""Files that are written whole or not at all, and the paths that callers name."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stopped import fail_after_writing

from qtool.errors import UsageError
from qtool.system.files import atomic_path, require_writable, sha256_of


@pytest.mark.parametrize("name", ["model.onnx", "report.html", "net.int8.pt2"])
def test_a_new_folder_is_not_named_as_a_file(name: str, tmp_path: Path) -> None:
    stem = tmp_path / name.rpartition(".")[0]
    with pytest.raises(UsageError, match=f"that of a file; name it '{re.escape(str(stem))}', say"):
        require_writable(tmp_path / name)
    (tmp_path / name).mkdir()
    require_writable(tmp_path / name)  # one that is there is the user's own choice
    require_writable(tmp_path / "resnet50.v1")


def test_a_full_disk_names_the_file_that_did_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, atomic_path(tmp_path / "a.bin"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.bin")


def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        fail_after_writing(temporary)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("told", [True, False])
def test_an_atomic_write_keeps_the_suffix_and_honours_the_umask(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before, asked = tmp_path / "deep" / "a.onnx", os.umask(0o027), list[int]()
    real, read = os.umask, Path.read_text
    monkeypatch.setattr(os, "umask", lambda mask: asked.append(mask) or real(mask))
    if not told:
        monkeypatch.setattr(Path, "read_text", lambda file: "" if str(file) == "/proc/self/status" else read(file))
    try:
        with atomic_path(path) as temporary:
            assert temporary.suffix == ".onnx"
            temporary.write_text("new")
    finally:
        mask = real(before)
    assert mask == 0o027
    assert path.stat().st_mode & 0o777 == 0o640
    assert not asked or not told or sys.platform != "linux", "files of other threads would have had other rights"


def test_temporary_files_of_dead_processes_are_swept_and_of_living_ones_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, kept = tmp_path / f".a-{dead.pid}-xyz.txt", tmp_path / f".a-{os.getppid()}-xyz.txt"
    for path in (left, kept):
        path.write_text("half")
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert not left.exists()
    assert kept.exists()


def test_a_folders_hash_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = sha256_of(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    renamed = sha256_of(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, renamed, sha256_of(tmp_path)}) == 3
