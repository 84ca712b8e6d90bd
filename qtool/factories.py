"""Factories: how a user's own Python becomes a model, a data set or a task.

A factory is a function that takes no argument, named by the file or the module that holds it::

    path/file.py:factory
    package.module:factory

A file is read once: the bytes whose sha256 is recorded are the bytes that are executed. The hash is what lets a later
stage run the same factory again without being asked, see :func:`require_same`. It covers that one file; what the file
imports, from its own folder or from installed packages, is the user's to keep.

Left out on purpose: arguments. A factory with settings is a function of two lines that calls another one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qtool.errors import QtoolError, UsageError, kind_of, left, nearest

PRETRAINED = "pretrained"
"""As a file of weights: what a library offers for its architecture."""
RESERVED = ("alice", "hf", "idx", "imagefolder", "npz", "text", "timm", "torchvision", "transformers")


@dataclass(frozen=True)
class Factory:
    """A user's function, ready to call, and the hash of the file that it came from.

    Calling it raises QtoolError, naming file, line and exception, where the function raises.
    """

    spec: str
    function: Callable[[], Any]
    file: Path | None
    file_sha256: str | None

    def __call__(self) -> Any:
        with _importable(self.file.parent if self.file else Path.cwd()), _told(self.spec, self.file):
            return self.function()


def is_factory(spec: str) -> bool:
    """Whether ``spec`` reads as ``path/file.py:factory`` or ``package.module:factory``.

    >>> is_factory("nets/mine.py:build"), is_factory("pkg.nets:build"), is_factory("resnet"), is_factory("idx:/data")
    (True, True, False, False)

    What a data spec or a library's model begins with is no module, even where one of that name is installed.
    """
    place, colon, name = spec.rpartition(":")
    dotted = place not in RESERVED and all(part.isidentifier() for part in place.split("."))
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or dotted)


def anchored(spec: object, at: Callable[[str], str] = lambda path: str(Path(path).resolve())) -> str | None:
    """A spec with its path made absolute, so that it means the same from any folder; None for an object.

    ``at`` makes another of each path in it.

    >>> anchored("resnet"), anchored(object()), anchored("net.py:build", lambda path: f"there/{path}")
    ('resnet', None, 'there/net.py:build')
    """
    if not isinstance(spec, str):
        return None
    kind, colon, rest = spec.partition(":")
    if kind == "text" and rest:
        return f"text:{':'.join(part if part.isdecimal() else at(part) for part in rest.split(':'))}"
    name, *more = rest.split(":") if kind == "hf" else [rest]
    if kind in ("hf", "transformers") and name and Path(at(name)).exists():  # a folder, or else a name of the hub
        return ":".join([kind, at(name), *more])
    if colon and kind in ("idx", "npz", "imagefolder") and rest:
        return f"{kind}:{at(rest)}"
    return f"{at(kind)}:{rest}" if colon and kind.endswith(".py") else spec


def load_factory(spec: str) -> Factory:
    """Imports what ``spec`` names and returns its function, not called yet.

    Raises UsageError where the file, module or function does not exist, QtoolError where importing it raises.
    """
    place, _, name = spec.rpartition(":")
    module, file, digest = _from_file(spec, Path(place)) if place.endswith(".py") else _from_module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        got = f"no '{name}'" if function is None else kind_of(function)
        raise UsageError(f"factory '{spec}'", f"a function '{name}' in {place}", got, nearest(name, known or [name]))
    if needed := _needed(function):
        do = "give them defaults, or name a function that calls it with what it needs"
        raise UsageError(f"factory '{spec}'", "a function that needs no arguments", f"one of {', '.join(needed)}", do)
    return Factory(spec, function, file, digest)


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that have to be given; none where Python does not know them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    varying = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in varying]


def require_same(record: Mapping[str, Any], *, trust: bool = False) -> None:
    """Refuses a recorded factory whose file is no longer the one that was recorded, unless it is trusted.

    ``record`` has its spec and the file's sha256. Nothing of the user's is executed here. Raises QtoolError.
    """
    spec, recorded = str(record["spec"]), record.get("file_sha256")
    found = factory_sha256(spec)
    if not trust and found != recorded:
        raise QtoolError(
            f"factory '{spec}'", f"the recorded file, sha256 {str(recorded)[:12]}…", f"{str(found)[:12]}…",
            "read what changed, then restore the file or pass --trust",
        )  # fmt: skip


def factory_sha256(spec: str) -> str | None:
    """The sha256 of the file behind a factory, without executing it; None where it has no source file.

    Finding ``a.b:f`` imports the package ``a``, as Python itself does. Raises UsageError where there is no such file.
    """
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return hashlib.sha256(_read(spec, Path(place))).hexdigest()
    with _importable(Path.cwd()), _told(spec, None):
        found = _find(spec, place)
    return hashlib.sha256(_read(spec, found)).hexdigest() if found else None


def _find(spec: str, name: str) -> Path | None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(f"factory '{spec}'", f"an installed module '{name}'", "none", "correct the name or install it")
    return Path(found.origin) if found.origin and found.has_location else None


def _from_module(spec: str, name: str) -> tuple[ModuleType, Path | None, str | None]:
    with _importable(Path.cwd()), _told(spec, None):
        file = _find(spec, name)
        module = importlib.import_module(name)
    return module, None, hashlib.sha256(_read(spec, file)).hexdigest() if file else None


def _from_file(spec: str, path: Path) -> tuple[ModuleType, Path, str]:
    source, path = _read(spec, path), path.resolve()
    digest = hashlib.sha256(source).hexdigest()
    name = f"qtool_factory_{path.stem}_{digest[:12]}"  # graphs hold it: wherever the file lies, they are the same
    while name in sys.modules and sys.modules[name].__file__ != str(path):
        name += "_"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # before executing: dataclasses look their own module up
        try:
            with _importable(path.parent), _told(spec, path):
                exec(compile(source, str(path), "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name], path, digest


def _read(spec: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        do = nearest(path.name, beside) if beside else "check the path"
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise UsageError(f"factory '{spec}'", f"a Python file '{path}'", got, do) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets the user's code import what lies beside it, as ``python file.py`` would, and only meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _told(spec: str, file: Path | None) -> Iterator[None]:
    """Turns an exception of the user's code into one line that says where it was raised."""
    try:
        yield
    except QtoolError:
        raise
    except SystemExit as error:
        raise left(error) from error
    except Exception as error:
        within = isinstance(error, ImportError) and "no known parent package" in str(error)
        do = "name it package.module:factory, from the folder of the package" if within else "correct that line"
        if isinstance(error, ModuleNotFoundError) and error.name:
            do = f"install the package of '{error.name.partition('.')[0]}', or correct that line"
        raised = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise QtoolError(f"factory '{spec}'", "no exception", f"{raised} ({_line(error, file)})", do) from error


def _line(error: Exception, file: Path | None) -> str:
    """``file:line`` of the innermost frame in the user's file, or of the innermost frame at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and frame.filename == str(file)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
