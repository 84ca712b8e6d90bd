from __future__ import annotations

import time

import pytest

from qtool.benchmarking import stopwatch
from qtool.benchmarking.stopwatch import Stopwatch, without_waiting


@pytest.mark.parametrize(
    ("wall", "waited", "cpu", "own"),
    [(3.0, 0.0, 3.0, 3.0), (3.0, 1.0, 2.0, 2.0), (3.0, 2.5, 2.0, 2.0), (3.0, 0.0, 9.0, 3.0), (3.0, 1.0, 0.1, 2.0)],
)
def test_waiting_is_taken_out_but_never_the_time_that_was_used(wall, waited, cpu, own):
    assert without_waiting(wall, waited, cpu) == own


def fake(monkeypatch, waits):
    """Threads whose wait counters are read off ``waits`` (nanoseconds, before and after), on a clock of 1 s a look."""
    reads = iter(waits)
    monkeypatch.setattr(stopwatch, "_open_schedstats", lambda: [0, 1])
    monkeypatch.setattr(stopwatch, "_waited_ns", lambda file: next(reads))
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(stopwatch.os, "close", lambda file: None)


def test_the_longest_wait_of_any_thread_is_taken_off(monkeypatch):
    fake(monkeypatch, [100, 0, 100 + int(2e8), int(6e8)])
    watch = Stopwatch()
    watch.start()
    assert watch.stop() == pytest.approx((0.4, 0.6))


def test_sleeping_is_not_waiting_for_a_core():
    watch = Stopwatch()
    watch.start()
    time.sleep(0.05)
    own, waited = watch.stop()
    watch.close()
    assert own + waited >= 0.05
    assert own > 0


def test_without_counters_it_is_a_plain_watch(monkeypatch, tmp_path):
    monkeypatch.setattr(stopwatch, "_TASKS", tmp_path / "absent")
    watch = Stopwatch()
    watch.start()
    own, waited = watch.stop()
    assert waited == 0
    assert own > 0
