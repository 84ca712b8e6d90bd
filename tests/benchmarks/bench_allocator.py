"""Forward pass of MobileNetV2 at 224 pixels, batch 32, with and without the allocator settings; prints the ratio.

    python tests/benchmarks/bench_allocator.py [--repeats 3]

Each measurement is a fresh process, the two kinds alternating; the least time of each is compared, since
noise from other work only adds. The forward pass is timed as the process's CPU time and as wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WORKER = """
import json, resource, sys, time
from qtool.system import allocator
tuned = allocator.tune()
import torch
from nets import mobilenet_v2
model, images = mobilenet_v2().eval(), torch.randn(32, 3, 224, 224)
with torch.no_grad():
    model(images)
    walls, start = [], time.process_time()
    for _ in range(3):
        begin = time.perf_counter()
        model(images)
        walls.append(time.perf_counter() - begin)
print(json.dumps({
    "tuned": tuned,
    "wall_ms_per_image": min(walls) / 32 * 1e3,
    "cpu_ms_per_image": (time.process_time() - start) / 3 / 32 * 1e3,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def measure(switch: str) -> dict[str, float]:
    environment = os.environ | {"QTOOL_MALLOC": switch, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    runs: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    for _ in range(repeats):
        for switch, found in runs.items():
            found.append(measure(switch))
    best = {
        switch: {key: min(run[key] for run in found) for key in ("wall_ms_per_image", "cpu_ms_per_image", "peak_mib")}
        for switch, found in runs.items()
    }
    for switch, name in (("0", "as glibc comes"), ("1", "tuned")):
        print(f"{name:15}", "  ".join(f"{key} {value:8.2f}" for key, value in best[switch].items()))
    for key in ("wall_ms_per_image", "cpu_ms_per_image", "peak_mib"):
        print(f"ratio {key}: {best['0'][key] / best['1'][key]:.2f}")


if __name__ == "__main__":
    main()
