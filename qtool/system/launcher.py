"""Starts the processes that train one model together, and watches over them.

:func:`launch` runs one function in several new processes. They find each other as they would under
``torchrun``: through its environment variables and a key-value store, which this process keeps. New
interpreters are started (``spawn``): a fork of a process that has used CUDA or threads is not sound.

A process that dies, by an error or by a kill, would leave the others waiting in an exchange that never
comes. So the first death ends them all: after a second, in which errors that others had at the same time
arrive, the rest are told to stop, and killed if they do not. What is raised is the cause, and not
what followed from it: an error that names itself before a kill, a kill before a connection that broke.
When this process is killed, the others see that and stop too.

A new interpreter runs the script that started it once more, for what is defined there. One that trains at its top level
would start processes in them again; they end with a code of their own, and the error names the missing guard.

Left out on purpose: several machines, which are ``torchrun``'s.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from qtool.errors import QtoolError, QtoolWarning, UsageError, left, says_that_another_ended, warning_line
from qtool.system.control_groups import usable_cores

GRACE = 1.0
"""Seconds in which the errors of other processes are waited for after the first, and in which they stop when told."""
UNGUARDED = 79
"""The exit code of a process that was about to start others while it read its script."""
_HOST = "127.0.0.1"
_NAME = "rank"


class Killed(QtoolError):
    """A process was ended by the signal ``by``, without a word of its own."""

    by: signal.Signals | int = 0


@dataclass
class _Running:
    rank: int
    process: BaseProcess
    reports: Connection
    error: Exception | None = None
    ended: float = field(default=float("inf"))


def launch(function: Callable[..., object], count: int, *arguments: Any) -> None:
    """Runs ``function(*arguments)``, found by its module and name, in ``count`` processes, until all have ended.

    Raises what one of them raised, or Killed where a signal ended one; the others have ended then.
    Raises QtoolError where the arguments cannot be sent to another process, UsageError in one that may start none.
    """
    from torch._C._distributed_c10d import TCPStore

    require_main()
    if multiprocessing.current_process().daemon:
        do = "use concurrent.futures.ProcessPoolExecutor, or devices=1"
        raise UsageError("argument 'devices'", "a process that may start others", "a worker of a pool", do)
    sent = _packed((function, arguments, list(warnings.filters), logging.root.manager.disable))
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    running = [_start(rank, count, store.port) for rank in range(count)]
    try:
        for one in running:
            with contextlib.suppress(OSError):  # it has ended: what its exit code tells is told
                one.reports.send_bytes(sent)
        _watch(running)
    finally:
        _stop(running)
    failed = sorted((one for one in running if one.error is not None), key=_blame)
    if failed:
        assert failed[0].error is not None
        raise failed[0].error


def require_main() -> None:
    """Raises QtoolError in a process that only reads its script again; in one of those started here it ends that."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.startswith(_NAME):
            leave(UNGUARDED)
        raise _unguarded()


def _unguarded() -> QtoolError:
    return QtoolError(
        "script", "what it does under `if __name__ == '__main__':`", "work at its top level",
        "put it under that line: each process that is started runs the script once more for what it defines",
    )  # fmt: skip


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _unsent(error, "give them as specs (FILE.py:factory), or use torchrun") from error


def _unpacked(sent: bytes) -> Any:
    """What was sent, in the process that got it. Raises QtoolError for what only the sender's memory defines."""
    try:
        return pickle.loads(sent)
    except (AttributeError, ImportError) as error:
        do = "define them in a file and import it (a notebook is none), or give them as specs (FILE.py:factory)"
        raise _unsent(error, do) from error


def _unsent(error: Exception, do: str) -> QtoolError:
    expected = "a model, data and task that can be sent to other processes"
    return QtoolError("argument 'devices'", expected, f"{type(error).__name__}: {error}", do)


def _start(rank: int, count: int, port: int) -> _Running:
    """A process that waits to be sent what to do.

    It is no argument: ``start`` would wait for ever to write it for one that has ended as it read the script again.
    """
    context = multiprocessing.get_context("spawn")
    reports, other_end = context.Pipe()
    process = context.Process(target=_main, args=(rank, count, port, other_end), daemon=True, name=f"{_NAME} {rank}")
    process.start()
    other_end.close()
    return _Running(rank, process, reports)


def _watch(running: list[_Running]) -> None:
    """Returns when all have ended, or one has failed and the others had their grace."""
    alive, until = list(running), float("inf")
    while alive and time.monotonic() < until:
        signs: list[Any] = [
            sign for one in alive for sign in (one.process.sentinel, *([] if one.error else [one.reports]))
        ]
        wait(signs, None if until == float("inf") else max(0.0, until - time.monotonic()))
        alive = [one for one in alive if _look(one, len(running))]
        if until == float("inf") and any(one.error for one in running):
            until = time.monotonic() + GRACE


def _look(one: _Running, count: int) -> bool:
    """Takes a process's report, or notices that it died without one; returns whether it was alive before that."""
    dead = not one.process.is_alive()
    with contextlib.suppress(EOFError, OSError):
        if one.error is None and one.reports.poll():
            one.error, one.ended = pickle.loads(one.reports.recv_bytes()), time.monotonic()
    if one.error is None and dead and one.process.exitcode:
        one.error, one.ended = _death(one.rank, count, one.process.exitcode), time.monotonic()
    return not dead


def _death(rank: int, count: int, code: int) -> QtoolError:
    where, do = f"process {rank} of {count}", "run the same command again: it goes on from the last whole checkpoint"
    if code == UNGUARDED:
        return _unguarded()
    if code > 0:
        return QtoolError(where, "it to run to its end", f"an exit with code {code}", do)
    by = signal.Signals(-code) if -code in list(signal.Signals) else -code
    error = Killed(where, "it to run to its end", f"a kill by {getattr(by, 'name', by)}", do)
    error.by = by
    return error


def _blame(one: _Running) -> tuple[int, float]:
    """Sorts causes before what follows from them."""
    told, killed = isinstance(one.error, QtoolError), bool(one.process.exitcode and one.process.exitcode < 0)
    follows = not told and one.error is not None and says_that_another_ended(one.error)
    return (3 if follows else 1 if killed else 0 if told else 2), one.ended


def _stop(running: list[_Running]) -> None:
    for end in (BaseProcess.terminate, BaseProcess.kill):
        alive = [one.process for one in running if one.process.is_alive()]
        for process in alive:
            end(process)
        until = time.monotonic() + GRACE
        for process in alive:
            process.join(max(0.0, until - time.monotonic()))
    for one in running:
        one.reports.close()


def _main(rank: int, count: int, port: int, reports: Connection) -> None:
    """What a new process does: takes its place among the others, runs the function it is sent, tells its error."""
    if (parent := multiprocessing.parent_process()) is not None:
        end_after(partial(wait, [parent.sentinel]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who watches is interrupted too, and stops this one
    sys.stdout = sys.stderr
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": _HOST, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    try:
        function, arguments, filters, silent = _unpacked(reports.recv_bytes())
        logging.disable(silent)
        warnings.filters[:] = filters  # type: ignore[index]
        warnings.formatwarning = warning_line
        if rank:  # the first one's are enough
            warnings.simplefilter("ignore", QtoolWarning)
        function(*arguments)
        code = 0
    except (Exception, SystemExit) as error:
        reports.send_bytes(_told(left(error) if isinstance(error, SystemExit) else error, rank, count))
        code = 1
    leave(code)


def end_after(waiting: Callable[[], object]) -> None:
    """Ends this process when ``waiting`` returns: the one who has started it is gone. Meanwhile it goes on."""

    def wait_and_end() -> None:
        waiting()
        os._exit(1)  # at once: there is nobody left to write to

    threading.Thread(target=wait_and_end, daemon=True).start()


def leave(code: int) -> NoReturn:
    """Ends this process, one of several, without the interpreter's own end. All that it writes is written by now.

    After an error, threads of communication libraries are still there, and one that gives back a tensor of an exchange
    that is over aborts an orderly end now and then; whoever started this process would take that for the cause.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            stream.flush()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # semaphores, which would be told as leaked
    os._exit(code)


def _told(error: Exception, rank: int, count: int) -> bytes:
    """The error as it travels, with its traceback as a note; one that cannot travel, by its words."""
    note = f"in process {rank} of {count}:\n{''.join(traceback.format_exception(error))}"
    try:
        pickle.loads(data := pickle.dumps(error))
        del data
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return pickle.dumps(error)
