"""The process in which one variant is opened, timed and weighed. Run by :mod:`qtool.benchmarking.process`.

One JSON request a line on standard input, one JSON answer a line on what was standard output; anything
that a runtime prints there goes to standard error instead. Only the runtime that is asked for is
imported, so that memory is that of serving the model and not of the tool.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

import numpy as np

from qtool.benchmarking.memory import peak_bytes, reset_peak, resident_bytes
from qtool.benchmarking.stopwatch import Stopwatch
from qtool.errors import QtoolError
from qtool.runtimes import RUNTIMES, open_session
from qtool.runtimes.base import Array, arithmetic

_IMPORTED_LATE = {"openvino": ("openvino",), "torch": ("qtool.graphs.programs", "torch._export.serde.serialize")}
"""What a runtime's module leaves until a file is opened."""
CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "Convert", "Reorder"})


class Server:
    """Answers requests about one model file; each public method is one request."""

    def __init__(self) -> None:
        self._session: Any = None
        self._feeds: dict[str, Array] = {}
        self._step: Callable[[], None] | None = None
        self._baseline: int | None = None

    def start(self, provider: str, cores: list[int] | None) -> dict[str, Any]:
        """Pins the process and imports the runtime: the state that memory and the time to load are counted from."""
        if cores:
            os.sched_setaffinity(0, cores)
        runtime = RUNTIMES[provider]
        for name in (f"qtool.runtimes.{runtime}", *_IMPORTED_LATE.get(runtime, ())):
            with suppress(Exception):  # told as the file is opened
                importlib.import_module(name)
        return {}

    def open(self, path: str, **options: Any) -> dict[str, Any]:
        """Opens the file; the milliseconds that took, and the inputs."""
        gc.collect()
        reset_peak()
        self._baseline = resident_bytes()
        start = time.perf_counter()
        self._session = open_session(path, **options)
        return {
            "load_ms": (time.perf_counter() - start) * 1e3,
            "device": self._session.device,
            "stored": getattr(self._session, "stored", None),
            "inputs": [[info.name, info.dtype, info.shape] for info in self._session.inputs],
        }

    def feed(self, path: str, names: Sequence[str]) -> dict[str, Any]:
        """Reads the inputs ``names`` from an ``.npz`` to where the model computes; the first run's milliseconds."""
        with np.load(path) as arrays:
            self._feeds = dict(zip(names, arrays.values(), strict=True))
        self._step = self._session.prepare(self._feeds)
        start = time.perf_counter()
        self._step()
        return {"first_run_ms": (time.perf_counter() - start) * 1e3}

    def burst(self, runs: int, warm: int) -> dict[str, Any]:
        """Seconds of each of ``runs`` runs after ``warm`` thrown away, and seconds waited for a core in all."""
        assert self._step is not None, "feed comes before burst"
        for _ in range(warm):
            self._step()
        gc.disable()
        watch = Stopwatch()
        try:
            timed = [self._timed(watch, self._step) for _ in range(runs)]
        finally:
            watch.close()
            gc.enable()
        return {"seconds": [own for own, _ in timed], "waited": sum(waited for _, waited in timed)}

    @staticmethod
    def _timed(watch: Stopwatch, step: Callable[[], None]) -> tuple[float, float]:
        watch.start()
        step()
        return watch.stop()

    def memory(self) -> dict[str, Any]:
        """Peak bytes since the file was opened, beyond what was held before; None where unknown."""
        peak = peak_bytes()
        known = peak is not None and self._baseline is not None
        return {"peak_bytes": max(0, peak - self._baseline) if known else None}  # type: ignore[operator]

    def outputs(self) -> dict[str, Any]:
        """What the file says of its outputs, where it does, and the shapes that they have for the inputs."""
        told = [[info.name, info.dtype, info.shape] for info in self._session.outputs]
        return {"told": told, "shapes": [value.shape for value in self._session.run(self._feeds)]}

    def kernels(self) -> dict[str, Any]:
        """What ran: the multiplying operations by number format, and the nodes beside the provider."""
        kernels = self._session.kernels(self._feeds)
        return {
            "arithmetic": arithmetic(kernels),
            "num_kernels": len(kernels),
            "num_conversions": sum(kernel.op in CONVERSIONS for kernel in kernels),
            "elsewhere": self._elsewhere(kernels),
        }

    def _elsewhere(self, kernels: Any) -> list[str]:
        if RUNTIMES[self._session.provider] != "ort":
            return []
        from qtool.runtimes.ort import PROVIDERS
        from qtool.runtimes.profile import check_placement

        return check_placement(f"'{self._session.path}'", kernels, PROVIDERS[self._session.provider])


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers each line of ``requests`` until there are no more."""
    server = Server()
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except QtoolError as error:
            answer = {"error": [error.where, error.expected, error.got, error.do]}
        except Exception:
            answer = {"crash": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves standard input, with standard output kept for the answers alone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
