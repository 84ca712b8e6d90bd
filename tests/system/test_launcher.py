import logging
import multiprocessing
import os
import signal
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import warm

from qtool.errors import QtoolError, UsageError
from qtool.system.launcher import Killed, launch

RANK = "RANK"


@pytest.fixture(autouse=True)
def _filters_of_builtin_warnings_alone():
    """Filters are sent along, and those that other tests' imports have made would have each process import torch."""
    with warnings.catch_warnings():
        warnings.filters[:] = [one for one in warnings.filters if one[2].__module__ == "builtins"]
        yield


def write_place(folder):
    silent = logging.root.manager.disable
    (folder / os.environ[RANK]).write_text(f"{os.environ['LOCAL_RANK']} of {os.environ['WORLD_SIZE']}, {silent}")


def write_threads(folder):
    (folder / "threads").write_text(os.environ["OMP_NUM_THREADS"])


def fail_in_one(wait_file):
    if os.environ[RANK] == "1":
        raise UsageError("here", "this", "that", "do so")
    time.sleep(60)
    wait_file.touch()


def die_in_one(how):
    if os.environ[RANK] == "1":
        os.kill(os.getpid(), how)
    time.sleep(0.2)
    if os.environ[RANK] == "0":
        raise RuntimeError("[gloo] Connection closed by peer")
    time.sleep(60)


def leave_in_one():
    if os.environ[RANK] == "1":
        sys.exit(0)
    time.sleep(60)


def raise_what_cannot_travel():
    class Own(Exception):
        pass

    raise Own("said so")


def hold_a_semaphore(folder):
    hold_a_semaphore.held = multiprocessing.get_context("spawn").Semaphore()
    (folder / "name").write_text(hold_a_semaphore.held._semlock.name)


def test_semaphores_end_with_their_process(tmp_path):
    """As those of compilers' workers; the system keeps them otherwise, and a warning tells so at the end."""
    launch(hold_a_semaphore, 1, tmp_path)
    name = (tmp_path / "name").read_text().lstrip("/")
    assert not Path("/dev/shm", f"sem.{name}").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such binding here")
def test_processes_share_the_cores_that_this_one_is_bound_to(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(bound)})
    try:
        launch(write_threads, 1, tmp_path)
    finally:
        os.sched_setaffinity(0, bound)
    assert (tmp_path / "threads").read_text() == "1"


def test_processes_know_their_places_and_what_is_not_to_be_told(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    launch(write_place, 2, tmp_path)
    assert sorted((p.name, p.read_text()) for p in tmp_path.iterdir()) == [("0", "0 of 2, 30"), ("1", "1 of 2, 30")]


def test_an_error_in_one_ends_the_others(tmp_path):
    start = time.monotonic()
    with pytest.raises(UsageError, match="here: expected this"):
        launch(fail_in_one, 2, tmp_path / "done")
    assert time.monotonic() - start < 30
    assert not (tmp_path / "done").exists()


def test_a_kill_is_told_before_what_followed_from_it():
    start = time.monotonic()
    with pytest.raises(Killed, match=r"process 1 of 3.*a kill by SIGKILL; .*last whole checkpoint") as caught:
        launch(die_in_one, 3, signal.SIGKILL)
    assert caught.value.by == signal.SIGKILL
    assert time.monotonic() - start < 30


def test_code_that_ends_its_process_is_told():
    with pytest.raises(QtoolError, match=r"your code: expected .*; got sys\.exit\(0\) in .*test_launcher\.py:\d+; "):
        launch(leave_in_one, 2)


def test_a_worker_of_a_pool_is_told_that_it_starts_no_others(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(UsageError, match=r"'devices'.*a worker of a pool; use concurrent\.futures"):
        launch(print, 1)


def test_an_error_that_cannot_be_sent_is_sent_as_words():
    with pytest.raises(RuntimeError, match="Own: said so") as caught:
        launch(raise_what_cannot_travel, 1)
    assert "raise_what_cannot_travel" in caught.value.__notes__[0]


def test_arguments_that_cannot_be_sent_are_refused():
    with pytest.raises(QtoolError, match="torchrun"):
        launch(write_place, 2, lambda: 0)


SCRIPT = """
import torch, qtool
class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 2
model = torch.nn.Sequential(torch.nn.Linear(4, 9999), torch.nn.Linear(9999, 2))
"""
TRAINS = 'qtool.train(model, {"train": Points(), "test": Points()}, epochs=1, devices=2, batch_size=4, device="cpu")'
LOADS = """
spawned = torch.utils.data.DataLoader(Points(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
qtool.train(model, spawned, epochs=1, device="cpu")
"""


@pytest.mark.parametrize(("work", "where"), [(TRAINS, "script: expected"), (LOADS, "training batches: expected")])
def test_a_script_without_a_guard_is_told_of_it(tmp_path, work, where):
    """Its processes run it again; those of qtool's own say nothing. Its model is more than a pipe holds."""
    (tmp_path / "script.py").write_text(SCRIPT + work)
    done = warm.Started(tmp_path / "said", warm.script_file, tmp_path / "script.py")
    assert done.end() == 1
    last = done.said().strip().splitlines()[-1]
    assert where in last
    assert "if __name__ == '__main__':" in last
    assert done.said().count("Traceback") == 1 or work is LOADS


def test_what_only_a_notebook_defines_is_told_where_it_arrives(monkeypatch):
    notebook = types.ModuleType("notebook_cells")
    exec("def work(): pass", vars(notebook))
    monkeypatch.setitem(sys.modules, "notebook_cells", notebook)
    with pytest.raises(QtoolError, match=r"'devices'.*No module named 'notebook_cells'; define them in a file"):
        launch(notebook.work, 2)
