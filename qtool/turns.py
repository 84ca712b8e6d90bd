"""Work that belongs to the whole process, of which one thread at a time does any; the others wait for their turn.

What ``torch.export`` knows of the model that it traces, or of the file that it reads, is the process's. So is what a
prediction of memory puts in the place of torch's own functions: those see to it that other threads get torch's own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
TURN = threading.RLock()


def taking_turns(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function``, which a process runs one at a time of all that are such; one may call another."""

    @functools.wraps(function)
    def waiting(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with TURN:
            return function(*args, **kwargs)

    return waiting
