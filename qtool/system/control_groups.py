"""The control groups that this process is in (Linux): what a container or a batch system lets it have.

The memory that a machine has and the cores that it shows are the whole machine's. What a group of processes may take of
them is in files of its own, in two versions: the second has one tree of groups for everything, the first one for each
controller (``man 7 cgroups``). Elsewhere there are none.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True)
class ControlGroup:
    """A group of processes that share limits: its folder, and whether that is as in the first version."""

    folder: str
    first: bool

    def memory_left(self) -> int | None:
        """Bytes of its limit that are not in use; None where it has none, or is not to be seen."""
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if self.first else ("memory.max", "memory.current")
        limit, used = (self._read(name).strip() for name in names)
        if not (limit.isdecimal() and used.isdecimal()):
            return None
        unused = re.findall(rf"^{'total_' * self.first}inactive_file (\d+)$", self._read("memory.stat"), re.MULTILINE)
        return int(limit) - int(used) + sum(map(int, unused))

    def memory_kills(self) -> int | None:
        """How many of its processes were killed for lack of memory; None where it is not told."""
        return kills_in(self._read("memory.oom_control" if self.first else "memory.events"))

    def cores(self) -> float | None:
        """How many cores' time its processes may take together; None where that has no limit, or is not to be seen."""
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if self.first else ("cpu.max",)
        numbers = " ".join(map(self._read, names)).split()
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
            return None
        return int(numbers[0]) / int(numbers[1])

    def identity(self) -> str:
        """What tells it from another one that takes its name later, or has it elsewhere."""
        return f"{self.folder} {os.stat(self.folder).st_ino}"

    def _read(self, name: str) -> str:
        return read(f"{self.folder}/{name}")


def control_groups(controller: str) -> list[ControlGroup]:
    """Those that this process is in, inner ones first. In a container the outermost that it sees is its own.

    ``controller`` is ``memory`` or ``cpu``.
    """
    rows = re.findall(r"^\d+:(.*?):(/.*)$", read("/proc/self/cgroup"), re.MULTILINE)
    own = [(controller if names else "", path) for names, path in rows if not names or controller in names.split(",")]
    return [
        ControlGroup(f"{_ROOT}/{kind}{path}".rstrip("/"), bool(kind))
        for kind, inner in own or [(controller, "/"), ("", "/")]
        for path in (inner, *map(str, PurePosixPath(inner).parents))
    ]


def bound_cores() -> int:
    """How many hardware threads this process may run on, which a batch system limits."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """How many threads this process can keep at work: one for each that it may run on, or has the time of.

    Of more threads than its control groups give it time for (``docker --cpus``, a pod's limit), all stop when that is
    used up, those that others wait for as well.
    """
    times = [cores for group in control_groups("cpu") if (cores := group.cores()) is not None]
    return min([bound_cores(), *(max(1, math.ceil(cores)) for cores in times)])


def read(path: str) -> str:
    """The text of a file of the system's; empty where there is none."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def kills_in(text: str) -> int | None:
    """The count of processes killed for lack of memory in a file of counts; None where it has none."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None
