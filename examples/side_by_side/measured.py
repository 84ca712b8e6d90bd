"""The protocol of a peer: one process quantizes one file, and prints what that took as a line of JSON.

    python peers/NAME.py FP32.onnx CALIBRATION.npy OUT.onnx

CALIBRATION.npy holds float32 inputs, samples first. Only the standard library and numpy are imported here, so that a
peer may live in a virtual environment without qtool.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
Peer = Callable[[Path, Images, Path], str]
BATCH = 16


def report(quantize: Peer) -> None:
    """Runs ``quantize(source, images, out)``, which returns the library's version, and prints seconds and peak MiB."""
    source, images, out = (Path(word) for word in sys.argv[1:4])
    loaded = np.load(images)
    start = time.perf_counter()
    version = quantize(source, loaded, out)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"version": version, "seconds": took, "peak_mib": peak}))
