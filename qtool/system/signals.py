"""What a batch system or a closed terminal ends a program with, made an exception: what is open is tidied up.

By itself Python ends at once at SIGTERM and SIGHUP, and leaves the temporary files that its context managers would have
removed. A second signal does end it at once. Processes of torchrun's are left as they are: it sends SIGTERM to those
that wait in an exchange for one that has died, and they would not come back to Python.

The exception comes up wherever Python is, and what it meets there may swallow it: an import that goes on without a
package, a callback of native code. What then fails, fails of the signal, so each that came is remembered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ended(BaseException):
    """The signal ``by`` has asked this process to end."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = signal.Signals(by)


def interrupt_behind(error: BaseException) -> BaseException | None:
    """The interrupt that was made another error on its way: Python 3.11 does so within the definition of a class.

    It may also be the one that was on its way when the error came up.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, Ended | KeyboardInterrupt):
        found = found.__cause__ or found.__context__
    return found


@contextmanager
def interrupting() -> Iterator[list[BaseException]]:
    """Inside it the first SIGTERM or SIGHUP raises Ended in the main thread; one that is ignored (nohup) stays so.

    Gives a list, to which what signals have raised is added, SIGINT's KeyboardInterrupt too.
    """
    came: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread() or "TORCHELASTIC_RUN_ID" in os.environ:
        yield came
        return
    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(number: int, frame: FrameType | None) -> NoReturn:
        give_back()
        came.append(Ended(number))
        raise came[-1]

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        came.append(KeyboardInterrupt())
        raise came[-1]

    def give_back() -> None:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)

    for number in taken:
        signal.signal(number, end)
    if interrupts:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        give_back()
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
