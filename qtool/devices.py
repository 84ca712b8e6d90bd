"""Which device a run uses: what was asked for, or an error. A GPU that was asked for is never the CPU in silence."""

from __future__ import annotations

import os
import re

import torch

from qtool.errors import QtoolError, UsageError


def resolve_device(text: str) -> torch.device:
    """The device that ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA where there is one, else the CPU) names.

    Plain ``cuda`` is this process's own where it was launched as one of several, and else the current one.

    Raises UsageError for any other text, QtoolError for a CUDA device that this machine does not have.
    """
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UsageError(f"device '{text}'", "auto, cpu, cuda or cuda:N", repr(text), "correct the device")
    if text == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(text.partition(":")[2] or os.environ.get("LOCAL_RANK") or (torch.cuda.current_device() if found else 0))
    if index >= found:
        kind = "a build of torch without CUDA" if torch.version.cuda is None else f"{found} CUDA device(s)"
        raise QtoolError(f"device '{text}'", "that CUDA device", kind, "ask for --device cpu, or install a CUDA build")
    return torch.device("cuda", index)


def memory_used(device: torch.device) -> int:
    """Bytes in use: allocated tensors on CUDA, the resident set of this process on the CPU (0 where unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
