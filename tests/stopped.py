"""A run that is stopped behind a step, for tests of what goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Stop(Exception):
    """Raised by a run's report."""


def stop_after(step: int) -> Callable[[Any], None]:
    """A report that ends the run behind ``step``."""

    def report(at: Any) -> None:
        if at.step == step:
            raise Stop

    return report
