"""Temporary folders that a killed process does not leave for good: the next that needs one removes those.

A process holds a lock in each of its folders for as long as it lives, and a folder whose lock nobody holds is nobody's.
The lock gets its name when it is held, so that none is taken for one that was left while it is being made.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none: what a killed process left stays there
    fcntl = None  # type: ignore[assignment]

PREFIX = "qtool-"
LOCK = "lock"


class Folder:
    """A folder for temporary files, ``path``, called after ``what`` they are. Use it as a context, or close it."""

    def __init__(self, what: str) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{what}-")
        self.path = Path(self._folder.name)
        self._lock = (self.path / "unlocked").open("w")
        if fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / "unlocked").rename(self.path / LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder with all that is in it."""
        self._lock.close()
        self._folder.cleanup()


def _sweep() -> None:
    """Removes the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}") if fcntl is not None else ():
        try:
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue  # held, or another user's
