"""What belongs to the whole process, among threads: work that they do in turns, and settings that they share.

What ``torch.export`` knows of the model that it traces, or of the file that it reads, is the process's. So is what a
prediction of memory puts in the place of torch's own functions: those see to it that other threads get torch's own. Of
such work one thread at a time does any; the others wait for their turn. A setting that several want at once is made by
the first of them and undone by the last: each putting back what it met would leave it as another one had it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


def shared(setting: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """``setting``, which holds while any thread is inside: the first one in enters it, the last one out leaves it."""
    lock, made, inside = threading.Lock(), ExitStack(), 0

    @contextmanager
    def held() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                made.enter_context(setting())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    made.close()

    return held
