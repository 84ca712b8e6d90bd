"""The protocol of a peer: one process quantizes one file, and prints what that took as a line of JSON.

    python measured.py PEER FP32.onnx CALIBRATION.npy OUT.onnx

PEER is a file of ``peers/``. Its docstring's first line says which setting it stands for, ``NEEDS`` what pip installs
for it, and ``quantize(source, images, out)`` writes the INT8 file and returns the library's version.
CALIBRATION.npy holds float32 inputs, samples first. Only the standard library and numpy are imported here, and by a
peer's own file before ``quantize`` is called, so that a peer may live in a virtual environment without qtool.

The seconds are the wall clock's, with the library's own imports; the peak is that of the process's resident memory.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
BATCH = 16


class Reader:
    """Hands the images over in batches, as ONNX Runtime's quantizer and those built on it ask for them.

    All batches have the same size, at most :data:`BATCH`: percentile ranges fail where the last one is smaller.
    """

    def __init__(self, name: str, images: Images) -> None:
        batch = max(size for size in range(1, BATCH + 1) if len(images) % size == 0)
        self.all = [{name: images[i : i + batch]} for i in range(0, len(images), batch)]
        self.rewind()

    def get_next(self) -> dict[str, Images] | None:
        """The next batch; None after the last."""
        return next(self.left, None)

    def rewind(self) -> None:
        """Begins again."""
        self.left = iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


def main() -> None:
    peer = importlib.import_module(f"peers.{sys.argv[1]}")
    source, images, out = (Path(word) for word in sys.argv[2:5])
    loaded = np.load(images)
    start = time.perf_counter()
    try:
        version = peer.quantize(source, loaded, out)
    except ImportError as error:
        print(json.dumps({"absent": str(error)}))
        return
    took = time.perf_counter() - start
    print(json.dumps({"version": version, "seconds": took, "peak_mib": peak_mib()}))


def peak_mib() -> float:
    """The most resident memory so far: Linux's own record, since ``ru_maxrss`` begins with the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes, on macOS


if __name__ == "__main__":
    main()
