"""Peak memory of a process that loads and runs one model.

The kernel keeps the highest resident set of a process's own memory map as ``VmHWM``. ``ru_maxrss`` is
not used on Linux: it survives ``exec``, so a fresh process begins with the peak of the one that
started it. What is reported is the peak while loading and running, less what the process held before
the file was opened (interpreter, runtime library, inputs).
"""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """This process's resident memory now, or None where the system does not tell."""
    return _field("VmRSS") if _STATUS.exists() else peak_bytes()


def peak_bytes() -> int | None:
    """This process's highest resident memory since it began or since ``reset_peak``, or None."""
    if _STATUS.exists():
        return _field("VmHWM")
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Lets the peak start again from the present, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _field(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
