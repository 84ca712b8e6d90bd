"""Processes that find torch imported, and qtool: forks of a server that has done nothing else.

A new interpreter takes seconds for that, mostly longer than for what a test has it do. These are processes of their own
all the same: they have their own memory, can be killed, and know of the test's process only what was sent to them.
How processes start outside of the tests is shown elsewhere (``test_launcher.py``, ``test_cli.py``, ``test_kills.py``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from unittest import mock

CONTEXT: Any = multiprocessing.get_context("forkserver")
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel.distributed")
IF_HERE = (
    "bitsandbytes.optim", "onnxruntime", "onnxscript", "peft", "torch.onnx._internal.exporter._core", "torchao.optim",
    "torchao.quantization.pt2e.quantize_pt2e",
)  # fmt: skip
"""Where the tests that are run have imported them too, which shows that they can be, and that they are of use."""
_ENVIRONMENT = dict(os.environ)
"""As it is before any test changes it: the server's own, and so its processes'."""


_GROUPS: list[Path] = []
"""The control groups that processes of this one are put into."""


def _served() -> None:
    if multiprocessing.parent_process() is not None:
        return  # one of these, which knows the server: see _within
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "qtool")
    CONTEXT.set_forkserver_preload([*IMPORTED, *(name for name in IF_HERE if name in sys.modules), *own, "frozen"])
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()


def _process(target: Callable[..., object], args: tuple[Any, ...] = (), **options: Any) -> Any:
    _served()
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return CONTEXT.Process(target=_within, args=(address, _GROUPS, target, args), **options)


def _within(address: str, groups: list[Path], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """The function, in those control groups, in a process whose own are forks of the same server."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = address, lambda: None
    for processes in groups:
        processes.write_text(str(os.getpid()))
    _GROUPS[:] = groups
    target(*args)


class _Context(type(CONTEXT)):  # type: ignore[misc]
    Process = staticmethod(_process)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """In this block :mod:`qtool.system.launcher` starts such processes, with what it would send to new interpreters."""
    context = multiprocessing.get_context

    def warm(method: str | None = None) -> Any:
        return _Context() if method == "spawn" else context(method)

    with mock.patch.object(multiprocessing, "get_context", warm):
        yield


class Started:
    """``function(*arguments)`` in a process of its own, which prints into the file ``told``."""

    def __init__(self, told: Path, function: Callable[..., object], *arguments: Any) -> None:
        self.told = told
        told.write_text("")
        self.process = _process(_printing_to, (told, function, arguments))
        self.process.start()

    def wait_for(self, reached: Callable[[], object]) -> None:
        """Returns when that holds. The process has to be alive until then."""
        while not reached():
            assert self.process.is_alive(), self.said()
            time.sleep(0.002)

    def said(self) -> str:
        """What it has printed."""
        return self.told.read_text()

    def end(self) -> int:
        """Its exit code, when it has ended."""
        self.process.join()
        code: int = self.process.exitcode
        return code

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL


def _printing_to(told: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with told.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def command(*words: str) -> None:
    """What ``python -m qtool WORDS`` does."""
    from qtool.cli import main

    main.main(list(words), "qtool")


def launching(*words: str) -> None:
    """What :func:`command` does, whose processes are such ones too."""
    with launched():
        command(*words)


def torchrun(*words: str) -> None:
    """What ``python -m torch.distributed.run WORDS`` does, whose processes are new interpreters with the same path."""
    from torch.distributed import run

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    run.main(list(words))


def torchrun_of_forks(*words: str) -> None:
    """What :func:`torchrun` does, whose processes are such ones too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    told, close = Path(os.readlink("/proc/self/fd/1")), SubprocessHandler.close

    def closed(self: Any, death_sig: Any = None) -> None:
        with contextlib.suppress(ProcessLookupError):  # the server that forked it knows sooner of its end than torchrun
            close(self, death_sig)

    with (
        mock.patch.object(SubprocessHandler, "_popen", lambda self, words, env: Popen(words, env, told.open("a"))),
        mock.patch.object(SubprocessHandler, "close", closed),
    ):
        torchrun(*words)


class Popen:
    """:class:`subprocess.Popen` of ``python -u -m MODULE WORDS`` or ``python FILE WORDS``, in a session of its own."""

    def __init__(self, words: Sequence[str], env: dict[str, str], stdout: IO[str], **_: Any) -> None:
        self.process = _process(_printing_to, (Path(stdout.name), _interpreting, (list(words), env)))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.poll()


def _interpreting(words: list[str], env: dict[str, str]) -> None:
    os.setsid()
    os.environ |= env
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    if "-m" in words:
        sys.argv = words[words.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


def in_group(processes: Path, function: Callable[..., object], *arguments: Any) -> None:
    """``function(*arguments)`` in the control group with the file ``processes``, and what it starts."""
    processes.write_text(str(os.getpid()))
    _GROUPS.append(processes)
    function(*arguments)


def limited(limit: int, *words: str) -> None:
    """What :func:`command` does, and no file may become larger than ``limit`` bytes, as on a disk with no more room."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    command(*words)


def measured(request: str) -> tuple[int, str, str]:
    """What the fresh process of :mod:`qtool.stages.memory` answers: its exit code, its answer and what else it said."""
    with TemporaryDirectory() as folder:
        asks, answers = Path(folder, "asks"), Path(folder, "answers")
        os.mkfifo(asks)
        process = Started(Path(folder, "said"), _answering, asks, answers)
        with asks.open("w") as pipe:  # which stays open until the end: who finds it closed stops
            pipe.write(request + "\n")
            pipe.flush()
            code = process.end()
        return code, answers.read_text(), process.said()


def _answering(asks: Path, answers: Path) -> None:
    os.dup2(os.open(asks, os.O_RDONLY), 0)
    os.dup2(os.open(answers, os.O_WRONLY | os.O_CREAT), 1)
    from qtool.stages.memory import main

    main()


def script(code: str, *words: str) -> None:
    """What ``python -c CODE WORDS`` does."""
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


def script_file(file: Path) -> None:
    """What ``python -W ignore FILE`` does."""
    sys.path.insert(0, str(file.parent))
    warnings.simplefilter("ignore")
    runpy.run_path(str(file), run_name="__main__")
