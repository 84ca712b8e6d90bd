"""One fresh process per variant, driven from here.

Models that share a process share its allocator, its thread pool and its caches, and nobody can say
whose memory a peak was. A worker process holds one model and nothing else; while the others are timed
it waits in a read and costs nothing. From time to time all begin anew (``latency.py``). Each is pinned to as
many cores as it has threads (whole ones, counted from the last, since the first takes most interrupts), the same ones
for every variant.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from qtool.benchmarking.inputs import Layout, as_written
from qtool.benchmarking.latency import Renewal, Stopping, Timings, interleave
from qtool.errors import QtoolError, one_line
from qtool.runtimes.base import Array, ProviderError, TensorInfo
from qtool.system.temporary import Folder


class Worker:
    """A process that holds one variant. Use as a context manager; leaving it ends the process."""

    def __init__(self, name: str, *, provider: str, cores: list[int] | None = None) -> None:
        """Starts the process and imports the runtime in it. ``seconds`` is what opening and the first run take."""
        self.name, self.inputs = name, ()  # type: tuple[str, tuple[TensorInfo, ...]]
        self.seconds = 0.0
        self._folder = Folder("benchmark")
        self._log = self._folder.path / "stderr"
        self._told: dict[str, dict[str, Any]] = {}
        self._launch()
        try:
            self._prepare("start", provider=provider, cores=cores)
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "qtool.benchmarking.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(), encoding="utf-8",
            )  # fmt: skip

    def open(self, path: Path, **options: Any) -> dict[str, Any]:
        """Opens the file in the process as :func:`qtool.runtimes.open_session` does; raises what that raises.

        Gives ``load_ms``, the ``device``, and ``stored``, the format of most weights where the runtime knows it.
        """
        answer = self._prepare("open", path=str(path.resolve()), **options)
        self.inputs = as_written([_info(*told) for told in answer.pop("inputs")], path)
        return answer

    def feed(self, feeds: Mapping[str, Array]) -> float:
        """Hands the inputs over and runs once; the milliseconds of that first run."""
        path = self._folder.path / "feeds.npz"
        np.savez(path, *feeds.values())  # under numbers: an input may be called like one of savez's own arguments
        return float(self._prepare("feed", path=str(path), names=list(feeds))["first_run_ms"])

    def renew(self) -> None:
        """Begins anew in another process: the same file, opened alike, with the same inputs."""
        self._end()
        told, self.seconds = self._told, 0.0
        self._launch()
        for do, arguments in told.items():
            self._prepare(do, **arguments)

    def _prepare(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Asks for a step towards the first run, which is remembered, and adds its seconds to what these take."""
        start = time.perf_counter()
        answer = self._ask(do, **arguments)
        self.seconds += time.perf_counter() - start
        self._told[do] = arguments
        return answer

    def burst(self, runs: int, warm: int) -> tuple[list[float], float]:
        """Seconds of each of ``runs`` runs after ``warm`` thrown away, and seconds waited for a core in all."""
        answer = self._ask("burst", runs=runs, warm=warm)
        return answer["seconds"], answer["waited"]

    def peak_bytes(self) -> int | None:
        """Peak memory of loading and running so far, beyond the process before it; None where unknown."""
        value = self._ask("memory")["peak_bytes"]
        return None if value is None else int(value)

    def counts(self, samples: int) -> bool:
        """Whether any output has its part for each of the ``samples`` that were fed, or all are single numbers."""
        found, layout = self._ask("outputs"), Layout.of(self.inputs)
        infos = [_info(*told) for told in found["told"]]
        axes = [layout.axis(info, shape, samples) for info, shape in zip_longest(infos, found["shapes"]) if shape]
        return not axes or any(axis is not None for axis in axes)

    def kernels(self) -> dict[str, Any]:
        """What ran, see :meth:`qtool.benchmarking.worker.Server.kernels`. Raises for compute nodes elsewhere."""
        return self._ask("kernels")

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._died(do)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProviderError(*answer["error"])
        if "crash" in answer:
            raise RuntimeError(f"benchmark process of {self.name!r} failed:\n{answer['crash']}")
        return answer

    def _died(self, do: str) -> QtoolError:
        code = self._process.wait()
        tail = one_line(self._log.read_text(errors="replace")[-300:]) if self._log.exists() else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        memory = " (the system may have run out of memory)" if code == -9 else ""
        return QtoolError(
            f"benchmark of '{self.name}'", f"an answer to '{do}'", f"its process ended with {how}{memory} {tail}",
            "open the file on its own to see why, or use a smaller batch",
        )  # fmt: skip

    def close(self) -> None:
        """Ends the process and removes its temporary files."""
        self._end()
        self._folder.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was written last had nobody to read it
                assert stream is not None
                stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _info(name: str, dtype: str, shape: list[int | str | None] | None) -> TensorInfo:
    return TensorInfo(name, dtype, None if shape is None else tuple(shape))


def race(workers: Mapping[str, Worker], *, reference: str, stopping: Stopping, seed: int = 0) -> dict[str, Timings]:
    """Times workers that were fed side by side, in processes that begin anew together."""

    def start() -> None:
        for worker in workers.values():
            worker.renew()

    renewal = Renewal(start, sum(worker.seconds for worker in workers.values()))
    bursts = {name: worker.burst for name, worker in workers.items()}
    return interleave(bursts, reference=reference, stopping=stopping, seed=seed, renewal=renewal)


def _environment() -> dict[str, str]:
    """This environment, with the package that is running here first on the path."""
    root = str(Path(__file__).parent.parent.parent)
    rest = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root}


def whole_cores(count: int) -> list[int] | None:
    """``count`` cores to pin to, one hardware thread each, from the last; None where they cannot be had."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    taken: set[int] = set()
    chosen: list[int] = []
    for core in sorted(os.sched_getaffinity(0), reverse=True):
        if core not in taken:
            chosen.append(core)
            taken |= _siblings(core)
    return sorted(chosen[:count]) if len(chosen) >= count else None


def _siblings(core: int) -> set[int]:
    """The hardware threads that share ``core``'s execution units, itself included."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    if not path.exists():
        return {core}
    found: set[int] = set()
    for part in path.read_text().strip().split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
