from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool.benchmarking import process
from qtool.benchmarking.latency import Stopping
from qtool.benchmarking.process import Worker, race, whole_cores
from qtool.errors import QtoolError

FEEDS = {"x": np.zeros((2, 3, 8, 8), np.float32)}


@pytest.fixture(scope="module")
def worker(files):
    with Worker("int8", provider="cpu", cores=whole_cores(1)) as worker:
        worker.opened = worker.open(files["int8"], provider="cpu", threads=1)
        worker.feed(FEEDS)
        yield worker


def test_a_worker_opens_times_and_weighs(worker):
    assert worker.opened["load_ms"] > 0
    assert worker.opened["device"] == "cpu"
    assert [str(i) for i in worker.inputs] == ["float32[N, 3, 8, 8]"]
    seconds, waited = worker.burst(5, 1)
    assert len(seconds) == 5
    assert min(seconds) > 0
    assert waited >= 0
    assert 0 < worker.peak_bytes() < 200 << 20


@pytest.mark.parametrize(("provider", "library"), [("cpu", "qtool.runtimes.ort"), ("openvino", "openvino")])
def test_libraries_are_imported_before_the_file_is_opened(provider, library):
    code = "import sys; from qtool.benchmarking.worker import Server\nServer().start(sys.argv[1], None)\n"
    subprocess.run([sys.executable, "-c", code + "sys.modules[sys.argv[2]]", provider, library], check=True)


def test_a_worker_tells_what_ran(worker):
    told = worker.kernels()
    assert told["arithmetic"] == {"int8": 3}
    assert told["elsewhere"] == []


def test_a_worker_tells_whether_its_outputs_count_what_it_was_fed(worker):
    assert worker.counts(2)
    assert not worker.counts(3)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_a_worker_is_pinned(worker):
    assert os.sched_getaffinity(worker._process.pid) == set(whole_cores(1))


def test_a_worker_begins_anew_in_another_process(worker):
    before, inputs = worker._process.pid, worker.inputs
    worker.renew()
    assert worker._process.pid != before
    assert not Path(f"/proc/{before}").exists()
    assert worker.inputs == inputs
    assert len(worker.burst(2, 1)[0]) == 2
    assert 0 < worker.seconds < 60


def test_a_race_starts_its_workers_anew_and_keeps_their_inputs(files):
    with Worker("a", provider="cpu") as one, Worker("b", provider="cpu") as other:
        for worker in (one, other):
            worker.open(files["int8"], provider="cpu", threads=1)
            worker.feed(FEEDS)
        before = {one._process.pid, other._process.pid}
        timings = race({"a": one, "b": other}, reference="a", stopping=Stopping(width=9.0, seconds=600.0))
        assert len(timings["a"].sittings) == len(timings["b"].sittings) == 4
        assert not before & {one._process.pid, other._process.pid}


def test_errors_arrive_as_they_were_raised(tmp_path):
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"nonsense" * 5)
    with Worker("bad", provider="cpu") as worker:
        with pytest.raises(QtoolError) as caught:
            worker.open(bad, provider="cpu", threads=1)
        assert caught.value.where == f"'{bad}'"
        assert caught.value.exit_code == 1


def test_a_mistake_in_the_program_keeps_its_traceback():
    with Worker("none", provider="cpu") as worker, pytest.raises(RuntimeError, match="Traceback"):
        worker.burst(1, 0)


def test_a_process_that_dies_is_told_and_leaves_nothing(files):
    with Worker("int8", provider="cpu") as worker:
        folder = worker._folder.path
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(QtoolError, match=r"signal 9 \(the system may have run out of memory\)"):
            worker.open(files["int8"], provider="cpu", threads=1)
    assert not folder.exists()


def test_leaving_ends_the_process(files):
    with Worker("int8", provider="cpu") as worker:
        running = worker._process
    assert running.poll() is not None


def test_cores_are_whole_and_counted_from_the_last(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(process, "_siblings", lambda core: {core % 4, core % 4 + 4})
    assert whole_cores(1) == [7]
    assert whole_cores(4) == [4, 5, 6, 7]
    assert whole_cores(5) is None


def test_nothing_in_the_working_folder_is_imported(files, tmp_path, monkeypatch):
    (tmp_path / "onnxruntime.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    with Worker("fp32", provider="cpu") as worker:
        assert worker.open(files["fp32"], provider="cpu", threads=1)["load_ms"] > 0
