"""Files and folders: their hashes, the paths that callers name, and files that are whole or not there.

A file is written under a temporary name beside its own, flushed to disk and renamed: a process that is killed leaves
the one that was there, and what it left is removed by the next that writes there.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qtool.errors import UsageError, kind_of

FILES = frozenset({".onnx", ".xml", ".pt", ".pth", ".pt2", ".safetensors", ".html", ".json", ".toml"})
"""What the name of a file ends in that somebody may ask a stage for, which makes a folder of several."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, or of a folder's files (names and bytes, in sorted order), in hex."""
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_nameable(folder: Path) -> None:
    """Raises UsageError where the path of ``folder`` is no text, which torch and JSON files need it to be."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"run directory '{folder}'", "a path that is UTF-8", "one that is not", "name another folder, or rename it"
        ) from error


def path_of(given: object, where: str, expected: str, do: str) -> Path:
    """The path that a caller gave, as text or as one. Raises UsageError for anything else, and for no text at all."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        got = repr(given) if isinstance(given, str) else kind_of(given)
        raise UsageError(where, expected, got, do)
    return Path(given)


def require_writable(folder: Path) -> None:
    """Raises UsageError where ``folder`` takes no files, cannot be made, or would be a new one with a file's name."""
    require_nameable(folder)
    if folder.suffix in FILES and not folder.exists():
        raise UsageError(
            f"run directory '{folder}'", "the name of a folder", "that of a file",
            f"name it '{folder.with_suffix('')}', say: the files in it have names of their own",
        )  # fmt: skip
    try:
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists() or p.is_symlink())
        if there.is_dir() and os.access(there, os.W_OK):
            return os.rmdir(tempfile.mkdtemp(prefix=".", dir=there))  # some that the system makes allow it, and refuse
        other = "a file" if there.exists() else "a link to nothing"
        got = "a folder that cannot be written" if there.is_dir() else f"'{there}', which is {other}"
    except OSError as error:
        got = error.strerror or str(error)
    raise UsageError(f"run directory '{folder}'", "a folder to write to", got, "name another folder")


def names_file(path: Path) -> bool:
    """Whether that is a file, which is to be ONNX, or would be one, and no run directory."""
    return path.suffix == ".onnx" or path.is_file()


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Each path under its file's stem, or under as many of its folders before it as tell it from the others.

    Raises UsageError for one that is there twice, or two that differ in their suffix alone.

    >>> list(named([Path("a/model.onnx"), Path("b/model.onnx"), Path("b/other.onnx")]))
    ['a/model', 'b/model', 'other']
    """
    wholes = [path.absolute().with_suffix("").parts for path in paths]
    if again := next((path for at, path in enumerate(paths) if wholes[at] in wholes[:at]), None):
        do = "leave it out, or give a copy of another name"
        raise UsageError("files", "each of a name of its own", f"'{again}' again", do)
    found = {}
    for path, whole in zip(paths, wholes, strict=True):
        rivals = [other for other in wholes if other != whole]
        length = next(n for n in range(1, len(whole) + 1) if all(other[-n:] != whole[-n:] for other in rivals))
        found["/".join(whole[-length:])] = path
    return found


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name when the block ends, and vanishes when it raises.

    The temporary name keeps the suffix, since some writers choose a format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-{os.getpid()}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with told_as(path):
            yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def told_as(path: Path) -> Iterator[None]:
    """Gives an error of the system that names no file (a full disk does not) the name of ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def _sweep(path: Path) -> None:
    """Removes the temporary files for ``path`` of processes that are no more."""
    for old in path.parent.glob(f".{glob.escape(path.stem)}-*-*{glob.escape(path.suffix)}"):
        owner = old.name.removeprefix(f".{path.stem}-").partition("-")[0]
        if owner.isdecimal() and not _alive(int(owner)):
            old.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _umask() -> int:
    """What new files are not allowed. Asking the process for it sets it, also for files of other threads."""
    try:
        return int(re.findall(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 8)
    except (OSError, IndexError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask
