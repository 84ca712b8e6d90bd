"""A stopwatch that stops while the process is kept off the CPU by others.

On a busy machine a run of 3 ms is interrupted by the scheduler for 4 or 12, and the clock on the wall
measures the neighbours. Linux keeps for each thread the time it was ready and had no core
(``/proc/…/schedstat``, second number); taken off the wall time, what is left is what the model would
have needed on a free core. With several threads the longest wait of any is taken off, since the run
ends with its last thread. The wait can begin before the watch does, so the thread's own CPU time is
the least that is given.

Not taken out: caches that a neighbour emptied, clocks that it lowered, and what a hypervisor steals.
Elsewhere than on Linux the wall time is given as it is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


class Stopwatch:
    """Times runs of this process; make it after the runtime has started its threads."""

    def __init__(self) -> None:
        self._files = _open_schedstats()

    def start(self) -> None:
        """Begins a run."""
        self._waits = [_waited_ns(file) for file in self._files]
        self._cpu = time.thread_time()
        self._wall = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Ends the run: its seconds without waiting for a core, and the seconds that were waited."""
        wall = time.perf_counter() - self._wall
        cpu = time.thread_time() - self._cpu
        now = (_waited_ns(file) for file in self._files)
        waited = max((after - before for before, after in zip(self._waits, now, strict=True)), default=0) / 1e9
        own = without_waiting(wall, waited, cpu)
        return own, wall - own

    def close(self) -> None:
        """Closes the counters."""
        for file in self._files:
            os.close(file)
        self._files = []


def without_waiting(wall: float, waited: float, cpu: float) -> float:
    """Wall seconds less the wait, but no less than the CPU time that was used within them.

    >>> without_waiting(10.0, 0.0, 9.0), without_waiting(10.0, 7.5, 2.5), without_waiting(4.0, 4.5, 2.5)
    (10.0, 2.5, 2.5)
    """
    return min(wall, max(wall - waited, cpu))


def _open_schedstats() -> list[int]:
    try:
        return [os.open(task / "schedstat", os.O_RDONLY) for task in sorted(_TASKS.iterdir())]
    except OSError:  # no Linux, or a kernel without these counters
        return []


def _waited_ns(file: int) -> int:
    try:
        return int(os.pread(file, 64, 0).split()[1])
    except (OSError, IndexError, ValueError):  # the thread has ended
        return 0
