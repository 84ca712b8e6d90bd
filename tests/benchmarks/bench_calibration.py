"""What calibration costs on ResNet-50 and MobileNetV2 definitions: time over the forward pass, memory, estimators.

    python tests/benchmarks/bench_calibration.py [resnet50] [mobilenet_v2] [--size 224] [--batch 32]

Weights are random, batch-norm statistics settled, inputs random images. Printed per model:

- the observed pass over the float model's own forward pass, same batch, min-max and histogram, in wall time and
  in CPU time; rounds alternate, and the median of the rounds' ratios is taken, so that other work
  on the machine weighs on both sides;
- CPU seconds for each estimator to read every range from the histograms;
- with ``--memory``, the growth of resident memory between 64 samples and ``--samples``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from qtool.system import allocator

allocator.tune()

sys.path.insert(0, str(Path(__file__).parent.parent))

import nets  # noqa: E402

from qtool.graphs.edits import copied  # noqa: E402
from qtool.quantization.calibration.observers import RangeObserver  # noqa: E402
from qtool.quantization.capturing.float_form import float_form  # noqa: E402
from qtool.quantization.engines import pt2e  # noqa: E402
from qtool.quantization.placement import Placement  # noqa: E402
from qtool.quantization.ranges import ESTIMATORS, estimate  # noqa: E402
from qtool.quantization.ranges.histogram import Histogram  # noqa: E402
from qtool.quantization.targets import ORT_CPU  # noqa: E402

Pass = Callable[[torch.Tensor], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--samples", type=int, default=2048)
    options = parser.parse_args()
    for name in options.models:
        print(f"{name}, batch {options.batch} at {options.size}, {torch.get_num_threads()} threads")
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nets.settled(getattr(nets, name)(), options.size, batches=2)
    batch = torch.randn(options.batch, 3, options.size, options.size)
    passes = observed_passes(model, batch)
    for kind, (wall, cpu) in ratios(passes, batch, options.rounds).items():
        print(f"  calibration pass ({kind}) over the float forward pass: {wall:.2f} wall, {cpu:.2f} CPU")
    if options.memory:
        memory(passes["histogram"], batch, options.samples)
    histograms = [m.histogram for m in passes["histogram"].modules() if isinstance(m, RangeObserver)]
    for method in ESTIMATORS:
        print(f"  {method}: {seconds_to_read(histograms, method):.2f} CPU s for {len(histograms)} ranges")


def observed_passes(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.nn.Module]:
    plain = float_form(model, batch[:2])
    passes: dict[str, torch.nn.Module] = {"float": model.eval()}
    for kind, detailed in (("minmax", False), ("histogram", True)):
        graph = copied(plain)
        passes[kind] = pt2e.prepare(graph, Placement(graph, ORT_CPU), detailed=detailed)
    return passes


def ratios(passes: dict[str, Pass], batch: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {"minmax": [], "histogram": []}
    for run in passes.values():
        timed(run, batch)
    for _ in range(rounds):
        base = timed(passes["float"], batch)
        for kind, collected in found.items():
            wall, cpu = timed(passes[kind], batch)
            collected.append((wall / base[0], cpu / base[1]))
    return {
        kind: (statistics.median(w for w, _ in collected), statistics.median(c for _, c in collected))
        for kind, collected in found.items()
    }


def timed(run: Pass, batch: torch.Tensor) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        run(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def memory(run: Pass, batch: torch.Tensor, samples: int) -> None:
    resident = psutil.Process().memory_info
    for _ in images(batch, run, 64):
        pass
    before = resident().rss
    for _ in images(batch, run, samples):
        pass
    print(f"  resident memory from 64 to {samples} samples: {(resident().rss - before) / 2**20:+.1f} MiB")


def images(batch: torch.Tensor, run: Pass, samples: int) -> Iterator[None]:
    with torch.no_grad():
        for start in range(0, samples, len(batch)):
            run(batch * (1 + start / samples))  # the ranges grow
            yield


def seconds_to_read(histograms: list[Histogram], method: str) -> float:
    start = time.process_time()
    for histogram in histograms:
        estimate(histogram, method)
    return time.process_time() - start


if __name__ == "__main__":
    main()
