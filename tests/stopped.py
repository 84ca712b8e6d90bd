"""A run that is stopped behind a step, and a writer half way, for tests of what goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stop(Exception):
    """Raised by a run's report."""


def stop_after(step: int) -> Callable[[Any], None]:
    """A report that ends the run behind ``step``."""

    def report(at: Any) -> None:
        if at.step == step:
            raise Stop

    return report


def fail_after_writing(path: Path) -> None:
    """A writer that is stopped half way."""
    path.write_text("half")
    raise RuntimeError
