"""What a quantized candidate costs to run: its size, and its speed against FP32 in ONNX Runtime.

The candidate is written to ONNX as export would write it, without gates and into a temporary folder, and timed in turn
with the float file, one thread, batch 1. Candidates with the same units in float run the same kernels: one is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError
from qtool.system.temporary import Folder

if TYPE_CHECKING:
    from qtool.benchmarking.latency import Burst
    from qtool.form import QuantizedModel

SECONDS = 0.5
TIMED = "ort-cpu"


class Cost:
    """Sizes and speeds of candidates of one model. Use it as a context: it holds a temporary folder."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[tuple[str, int | None], ...], float | None] = {}
        self._folder: Folder | None = None

    def __enter__(self) -> Cost:
        self._folder = Folder("cost")
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.close()

    def size_bytes(self, model: QuantizedModel) -> int:
        """Bytes of the candidate's constants, as the size gate predicts them."""
        from qtool.exporting.gates.size import predicted_bytes

        return predicted_bytes(model)

    def speedup(self, model: QuantizedModel) -> float | None:
        """How many times faster than FP32; None for another target, a simulation, or where it cannot be opened."""
        key = tuple((unit.name, unit.weight_bits) for unit in model.plan.float_units)
        if model.plan.target != TIMED or model.plan.simulated:
            return None
        if key not in self._speeds:
            try:
                self._speeds[key] = self._measured(model)
            except QtoolError:  # export will say why; here a candidate without a speed is still one
                self._speeds[key] = None
        return self._speeds[key]

    def _measured(self, model: QuantizedModel) -> float:
        from qtool.benchmarking.latency import Stopping, interleave, speedup
        from qtool.exporting.gates.parity import feeds_of, take
        from qtool.exporting.to_onnx import default_opset, float_to_onnx, quantized_to_onnx, save
        from qtool.runtimes import open_session

        assert self._folder is not None
        opset, files = default_opset(model.plan), {}
        for name in ("fp32", "int8"):
            files[name] = self._folder.path / f"{name}.onnx"
        if not files["fp32"].exists():
            assert model.float_graph is not None
            save(float_to_onnx(model.float_graph, model.example, opset, model.plan.target), files["fp32"], {})
        save(quantized_to_onnx(model, opset), files["int8"], {})
        sessions = {name: open_session(path, threads=1) for name, path in files.items()}
        import onnx

        feeds = feeds_of(onnx.load(str(files["fp32"]), load_external_data=False), next(take([model.example], 1)))
        bursts = {name: _burst(session.prepare(feeds)) for name, session in sessions.items()}
        timings = interleave(bursts, reference="fp32", stopping=Stopping(seconds=SECONDS))
        for session in sessions.values():
            session.close()
        return speedup(timings, "fp32", "int8").ratio


def _burst(call: Callable[[], Any]) -> Burst:
    def burst(runs: int, warm: int) -> tuple[list[float], float]:
        for _ in range(warm):
            call()
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds, 0.0

    return burst
