"""The run directory: a kill leaves the old or the new artifact, and a changed file is refused."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stopped import fail_after_writing

from qtool import artifacts
from qtool.artifacts import has_result, mark_stale, output_path, pending, read_result, settle, staging, write_result
from qtool.errors import QtoolError

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(artifacts.__file__).parents[1])}


def commit(run: Path, files: Mapping[str, str], stage: str = "train", **extra: Any) -> dict[str, Any]:
    """Commits a stage of small text files named by their content's role."""
    with staging(run, stage) as folder:
        outputs = {}
        for name, text in files.items():
            outputs[name] = folder / f"{name}.txt"
            outputs[name].write_text(text)
        return write_result(run, stage, config={"a": 1}, inputs={"x": "y"}, outputs=outputs, metrics={}, extra=extra)


def test_a_committed_stage_reads_back(tmp_path: Path) -> None:
    written = commit(tmp_path / "run", {"model": "weights"}, note="kept")
    read = read_result(tmp_path / "run", "train")
    assert read == written
    assert read["note"] == "kept"
    assert read["outputs"]["model"]["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert output_path(tmp_path / "run", read, "model").read_text() == "weights"
    assert not pending(tmp_path / "run", "train").exists()


def test_what_only_the_result_before_had_is_gone(tmp_path: Path) -> None:
    commit(tmp_path, {"model": "old", "adapter": "of the old one"})
    (tmp_path / "mine.txt").write_text("a user's")
    commit(tmp_path, {"model": "new"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "model.txt", "train.json"]
    (tmp_path / "train.json").write_text("damaged")
    commit(tmp_path, {"other": "new"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "model.txt", "other.txt", "train.json"]


def test_what_depends_on_the_machine_is_recorded(tmp_path: Path) -> None:
    found = commit(tmp_path, {})["environment"]
    assert found["packages"]["torch"]
    assert found["cpu"]["cores"] >= 1
    assert found["python"].startswith("3.")


def test_files_without_a_name_of_their_own_are_recorded_too(tmp_path: Path) -> None:
    with staging(tmp_path, "export") as folder:
        (folder / "model.onnx").write_text("graph")
        (folder / "model.onnx.data").write_text("weights")
        write_result(tmp_path, "export", config={}, inputs={}, outputs={"int8": folder / "model.onnx"}, metrics={})
    (tmp_path / "model.onnx.data").write_text("other")
    with pytest.raises(QtoolError, match=r"model\.onnx\.data.*sha256"):
        read_result(tmp_path, "export")


def test_a_changed_or_missing_output_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, {"model": "weights"})
    (tmp_path / "model.txt").write_text("tampered")
    with pytest.raises(QtoolError, match=r"model\.txt.*expected sha256.*as recorded in train\.json.*delete it"):
        read_result(tmp_path, "train")
    assert read_result(tmp_path, "train", verify=False)
    (tmp_path / "model.txt").unlink()
    with pytest.raises(QtoolError, match="no file"):
        read_result(tmp_path, "train")


def test_a_result_that_may_not_be_read_is_not_to_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, {"model": "weights"})

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(QtoolError) as told:
        read_result(tmp_path, "train")
    assert told.value.got == "Permission denied"
    assert told.value.do == "check the path and its permissions"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "a JSON result"),
        ("[]", "schema"),
        ('{"schema": 99}', "got 99"),
        ('{"schema": 1}', "a whole result"),
        ('{"schema": 1, "stage": "train", "config": {}, "inputs": {}, "metrics": {}, "outputs": 5}', "no outputs"),
        ('{"schema": 1, "stage": "train", "config": [], "inputs": {}, "metrics": {}, "outputs": {}}', "no config"),
        (
            '{"schema": 1, "stage": "train", "config": {}, "inputs": {}, "metrics": {}, "outputs": {"model": null}}',
            "no file and sha256 of output 'model'",
        ),
    ],
)
def test_a_damaged_result_is_refused(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(QtoolError, match=part):
        read_result(tmp_path, "train")


def test_a_missing_stage_says_which_are_there(tmp_path: Path) -> None:
    commit(tmp_path, {})
    with pytest.raises(QtoolError, match=r"finished 'export' stage.*finished stages: train.*qtool export"):
        read_result(tmp_path, "export")


def test_a_stale_result_is_refused_and_its_files_stay(tmp_path: Path) -> None:
    commit(tmp_path, {"model": "weights"})
    mark_stale(tmp_path, "train", "a later one failed")
    with pytest.raises(QtoolError, match="a stale one: a later one failed"):
        read_result(tmp_path, "train")
    assert (tmp_path / "model.txt").read_text() == "weights"
    commit(tmp_path, {"model": "new"})
    assert "stale" not in read_result(tmp_path, "train")


def test_staging_that_fails_leaves_the_old_artifact_and_nothing_else(tmp_path: Path) -> None:
    commit(tmp_path, {"model": "old"})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RuntimeError), staging(tmp_path, "train") as folder:
        fail_after_writing(folder / "model.txt")
    assert sorted(tmp_path.iterdir()) == before
    assert read_result(tmp_path, "train")["outputs"]["model"]["sha256"] == hashlib.sha256(b"old").hexdigest()


def test_staging_that_fails_in_a_new_run_directory_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staging(tmp_path / "new", "train"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()


WORK = """
import sys, time
from functools import partial
from pathlib import Path
from qtool.artifacts import staging, write_result
run, name = Path(sys.argv[1]), sys.argv[2]
with staging(run, "train") as folder:
    print("in", flush=True)
    for file in "ab":
        (folder / f"{file}.txt").write_text(name)
        time.sleep(0.3)
    outputs = {file: folder / f"{file}.txt" for file in "ab"}
    write_result(run, "train", config={"name": name}, inputs={}, outputs=outputs, metrics={})
"""


def test_two_processes_at_one_stage_take_turns_and_mix_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", WORK, str(tmp_path)]
    first = subprocess.Popen([*words, "first"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert first.stdout is not None
    assert first.stdout.readline() == "in\n"
    monkeypatch.setattr("qtool.artifacts.WAIT_SECONDS", 0.0)
    with (
        pytest.raises(QtoolError, match="one 'qtool train' at a time; got another at work"),
        staging(tmp_path, "train"),
    ):
        raise AssertionError
    second = subprocess.run([*words, "second"], env=ENVIRONMENT, check=True, capture_output=True)
    first.communicate()
    assert first.returncode == second.returncode == 0
    assert read_result(tmp_path, "train")["config"] == {"name": "second"}
    assert {(tmp_path / f"{file}.txt").read_text() for file in "ab"} == {"second"}


def test_who_can_tell_it_waits_for_another_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.artifacts.WAIT_SECONDS", 0.0)
    words = [sys.executable, "-c", WORK, str(tmp_path), "first"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert first.stdout is not None
    assert first.stdout.readline() == "in\n"
    told: list[str] = []
    with staging(tmp_path, "train", told.append):
        assert read_result(tmp_path, "train")["config"] == {"name": "first"}
    first.communicate()
    assert told == [f"train: waiting for another 'qtool train' that is at work in '{tmp_path}'"]


def at_once(work: Callable[[], object], count: int) -> list[object]:
    """What several threads get that begin together; each opens files of its own, so that locks are between them."""
    barrier = threading.Barrier(count)

    def waiting() -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(waiting) for _ in range(count)]]


def test_readers_that_finish_one_commit_at_once_lose_none_of_it(tmp_path: Path) -> None:
    for attempt in range(30):
        run, names = tmp_path / str(attempt), [f"{name}.txt" for name in "abc"]
        commit(run, {"a": "a", "b": "b", "c": "c"})
        pending(run, "train").mkdir()
        for name in (*names, "train.json"):  # as a kill between the commit point and the first move leaves them
            (run / name).rename(pending(run, "train") / name)
        assert at_once(partial(has_result, run, "train"), 4) == [True] * 4
        read_result(run, "train")
        assert sorted(path.name for path in run.iterdir()) == [*names, "train.json"]


def test_a_reader_beside_a_writer_always_finds_a_whole_artifact(tmp_path: Path) -> None:
    commit(tmp_path, {"0": "0", "1": "0", "2": "0"})
    ended, read = threading.Event(), []

    def reading() -> None:
        while not ended.is_set():
            read.append(read_result(tmp_path, "train")["outputs"])

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(reading)
        for count in range(60):
            commit(tmp_path, {str(file): str(count) for file in range(3)})
            found = read_result(tmp_path, "train")
            assert found["outputs"]["0"]["sha256"] == hashlib.sha256(str(count).encode()).hexdigest()
        ended.set()
        reader.result()
    assert len({str(outputs) for outputs in read}) > 1


def test_moves_that_fail_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, {"a": "old"})
    move = Path.replace

    def refused(self: Path, target: Path) -> Path:
        if self.name == "a.txt":
            raise PermissionError
        return move(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refused)
        with pytest.raises(PermissionError):
            commit(tmp_path, {"a": "new"})
    assert read_result(tmp_path, "train")["outputs"]["a"]["sha256"] == hashlib.sha256(b"new").hexdigest()


DIE_WHILE_MOVING = """
import os, sys
from functools import partial
from pathlib import Path
from qtool.artifacts import pending, staging, write_result
run, left = Path(sys.argv[1]), int(sys.argv[2])
real = Path.replace
def replace(self, target):
    global left
    if self.parent == pending(run, "train") and not self.name.startswith("."):
        if left == 0:
            os._exit(9)
        left -= 1
    return real(self, target)
Path.replace = replace
with staging(run, "train") as folder:
    for name in "ab":
        (folder / f"{name}.txt").write_text("new")
    outputs = {n: folder / f"{n}.txt" for n in "ab"}
    write_result(run, "train", config={}, inputs={}, outputs=outputs, metrics={})
"""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_kill_between_the_moves_of_a_commit_is_rolled_forward(tmp_path: Path, moves: int) -> None:
    """After the commit point the new artifact is the one that is read, however many files had been moved."""
    commit(tmp_path, {"a": "old", "b": "old"})
    died = subprocess.run([sys.executable, "-c", DIE_WHILE_MOVING, str(tmp_path), str(moves)], env=ENVIRONMENT)
    assert died.returncode == 9
    assert pending(tmp_path, "train").exists()
    assert has_result(tmp_path, "train")
    read_result(tmp_path, "train")
    assert {p.name: p.read_text() for p in tmp_path.glob("*.txt")} == {"a.txt": "new", "b.txt": "new"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "train.json"]


WRITER = """
import sys
from functools import partial
from pathlib import Path
from qtool.artifacts import staging, write_result
run, count = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    count += 1
    with staging(run, "train") as folder:
        for name in "abc":
            (folder / name).write_text(str(count) * 20000)
        write_result(run, "train", config={"n": count}, inputs={}, outputs={n: folder / n for n in "abc"}, metrics={})
"""


def test_sigkill_at_any_moment_leaves_a_whole_artifact(tmp_path: Path) -> None:
    """A process commits again and again and is killed: the three files and the result are always of one commit."""
    commit(tmp_path, {})
    for delay in (0.0, 0.011, 0.023, 0.05, 0.08, 0.13):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=ENVIRONMENT
        )
        assert writer.stdout is not None
        with writer.stdout as lines:
            lines.readline()
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        result = read_result(tmp_path, "train")
        contents = {p.read_text()[: len(str(result["config"].get("n", "")))] for p in tmp_path.glob("[abc]")}
        assert contents <= {str(result["config"].get("n"))}


def test_settling_without_a_commit_point_changes_nothing(tmp_path: Path) -> None:
    folder = pending(tmp_path, "train")
    folder.mkdir()
    (folder / "model.txt").write_text("half")
    settle(tmp_path, "train")
    assert not (tmp_path / "model.txt").exists()
    assert not has_result(tmp_path, "train")
