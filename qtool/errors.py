"""What can go wrong, and how it is told.

Every error that a user can cause reads *where: expected; got; do this* in one line, so that a log
file holds the cause and the cure side by side. The class decides the exit code of the command line:

====  =====================================================================
code  meaning
====  =====================================================================
0     done
1     failed: something was wrong that only running could show
2     usage: a wrong command line or recipe, seen before any work was done
3     a gate or a contract was not met; the artifact was not delivered
====  =====================================================================

Programming errors are not wrapped: they keep their traceback.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class QtoolError(Exception):
    """Something the user can act on, told as ``where: expected …; got …; do``. Exit code 1."""

    exit_code = 1

    def __init__(self, where: str, expected: str, got: str, do: str) -> None:
        self.where, self.expected, self.got, self.do = where, expected, got, do
        super().__init__(one_line(f"{where}: expected {expected}; got {got}; {do}"))

    def __reduce__(self) -> Any:
        return type(self), (self.where, self.expected, self.got, self.do), vars(self)


OWN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What a user's own code raises, a model's or a task's, when it is wrong or what it is given is."""


FAILED_COMPILERS = ("InductorError", "BackendCompilerFailed")
"""What torch.compile raises where the compiler behind it fails, by name: torch's compiler is imported late."""


class UsageError(QtoolError):
    """A wrong command line, recipe or argument, found before any work. Exit code 2."""

    exit_code = 2


def require_file(path: Path, expected: str, do: str = "check the path") -> None:
    """Raises UsageError where ``path``, which was to be ``expected``, is a folder or nothing."""
    if not path.is_file():
        raise UsageError(f"'{path}'", expected, "a folder" if path.is_dir() else "no such file", do)


def unreadable(where: str, expected: str, error: OSError) -> QtoolError:
    """What is told of a file that the system does not let be read: what is in it is not known, nor to be made again."""
    return QtoolError(where, expected, error.strerror or str(error), "check the path and its permissions")


class OutOfMemory(QtoolError):
    """Memory ran out in a step. ``last`` says which checkpoint stands."""

    def __init__(self, where: str, expected: str, got: str, do: str, last: str = "") -> None:
        super().__init__(where, expected, got, do)
        self.last = last

    def __reduce__(self) -> Any:
        return type(self), (self.where, self.expected, self.got, self.do, self.last), vars(self)


class ContractError(QtoolError):
    """A gate or an accuracy contract that was not met; ``details`` is what was found, plain values. Exit code 3."""

    exit_code = 3
    details: Mapping[str, Any] | None = None


class QtoolWarning(UserWarning):
    """What a user has to know though it stops nothing. The command line shows these, and no library's."""


def warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """How a warning is written (a ``warnings.formatwarning``): one of qtool's own in a line of its own."""
    if issubclass(category, QtoolWarning):
        return f"qtool: warning: {one_line(message)}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def one_line(text: object) -> str:
    """``text`` with every run of white space, newlines included, made one space."""
    return " ".join(str(text).split())


def reason_of(error: BaseException) -> str:
    """An error's type and the first line of what it says: torch goes on with traces and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")[:300]


def left(error: SystemExit) -> QtoolError:
    """What is told of a user's own code that called ``sys.exit``: nothing that was asked for is there then."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return QtoolError(
        "your code", "it to return or to raise an error", f"sys.exit({error.code!r}) in {at.filename}:{at.lineno}",
        "raise an error instead, or put what the file does as a script under `if __name__ == '__main__':`",
    ).with_traceback(error.__traceback__)  # fmt: skip


def says_that_another_ended(error: Exception) -> bool:
    """Whether an error is that of an exchange whose other end is gone: what went wrong did so in another process."""
    words = str(error).lower()
    return any(word in words for word in ("connection", "socket", "gloo", "nccl", "peer"))


def kind_of(value: object) -> str:
    """What a value is, for an error's *got*.

    >>> kind_of(7), kind_of([]), kind_of(None)
    ('an int', 'a list', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


SHOWN = 16  # names that a one-line error can hold


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error's *do this*: the valid name most like ``name``, or those there are.

    >>> nearest("resnt", ["resnet", "mobilenet"])
    "did you mean 'resnet'?"
    >>> nearest("vgg", ["resnet", "mobilenet"])
    'choose one of: mobilenet, resnet'
    >>> nearest("lr", ["learning_rate", "lora"])
    "did you mean 'learning_rate'?"
    >>> nearest("bits", ["weight_bits", "edge_bits", "batch_size"])
    'choose one of: edge_bits, weight_bits'
    """
    known = sorted(set(names))
    meant = [other for other in known if "".join(word[:1] for word in re.split("[-_]", other.lstrip("-"))) == name]
    partly = [other for other in known if name in re.split("[-_]", other)]
    if len(partly) > 1 and not meant:
        known = partly
    elif close := meant or difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return f"choose one of: {', '.join(known[:SHOWN])}{more}"
