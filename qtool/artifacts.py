"""The run directory: what each stage leaves behind, and the proof that it is still what was left.

A stage writes its files into a pending folder beside their final names, then its ``<stage>.json`` there:
that is the commit point. Only then are the files moved into place, the result last. A kill before the
commit point leaves the old artifact whole; a kill after it leaves the moves to be finished, which the
next reader does. A result records the sha256 of every input and output, the versions of the packages that
made it, the configuration and the metrics. Reading a result re-hashes its outputs: a file that was changed
since is refused, not used.

Of two processes that write one stage, the second waits for the first (a lock that the system takes back from a
process that dies), so that no artifact is a mixture; of two that train or search, from the first checkpoint or
candidate on. What is left out on purpose: keeping a whole run directory for one process; stages of different names go
on beside each other, and each reads what is committed.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, one_line, unreadable
from qtool.system.files import sha256_of, told_as
from qtool.system.json_files import from_json, write_json
from qtool.system.machine import environment

SCHEMA_VERSION = 1
STAGES = ("train", "quantize", "export", "benchmark")
WAIT_SECONDS = 10.0


def pending(run: Path, stage: str) -> Path:
    """Where the files of a stage wait for their commit."""
    return run / f".{stage}-pending"


@contextmanager
def staging(run: Path, stage: str, tell: Callable[[str], None] | None = None) -> Iterator[Path]:
    """An empty folder for the files of ``stage``; what was not committed when the block ends is removed.

    Of several processes one has it at a time, and the others wait for it: until it is done where they can ``tell`` so,
    else up to ``WAIT_SECONDS``, then QtoolError.
    """
    new = not run.exists()
    folder = pending(run, stage)
    try:
        with alone(folder, stage, tell), told_as(folder):
            _move(run, stage)
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                yield folder
            finally:
                if not (folder / f"{stage}.json").is_file():  # committed, but the moves failed: they can be finished
                    shutil.rmtree(folder, ignore_errors=True)
    finally:
        if new and run.is_dir() and not any(run.iterdir()):
            run.rmdir()


@contextmanager
def alone(folder: Path, stage: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Makes ``folder`` and holds the system's lock on it, which a process that is killed gives back.

    Of several processes one has it at a time; see :func:`staging` for ``tell``.
    """
    end = time.monotonic() + WAIT_SECONDS
    while (held := _locked(folder)) is None:
        if time.monotonic() > end:
            if tell is None:
                raise QtoolError(
                    f"run directory '{folder.parent}'", f"one 'qtool {stage}' at a time", "another at work in it",
                    "wait until it is done, or name another folder with --out",
                )  # fmt: skip
            tell(f"{stage}: waiting for another 'qtool {stage}' that is at work in '{folder.parent}'")
            end = math.inf
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(held)


def _locked(folder: Path) -> int | None:
    """An open handle of the folder that is locked; None where another process has it, or took it away meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # it was there, and is gone again
        return None
    if sys.platform == "win32":  # it has no such locks
        return os.open(os.devnull, os.O_RDONLY)
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.stat().st_ino == os.fstat(handle).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def write_result(
    run: Path,
    stage: str,
    *,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    outputs: Mapping[str, Path],
    metrics: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Commits a stage: its files, which lie in the folder of :func:`staging`, and ``<stage>.json``, as one.

    ``inputs`` maps a name to what identifies it (a sha256, or a spec with its hash); ``outputs`` maps a
    name to a file or folder, hashed here; files beside them that have no name get their own. ``extra``
    holds what later stages need. Returns the result.
    """
    folder = pending(run, stage)
    named = {path.resolve(): name for name, path in outputs.items()}
    result = {
        "schema": SCHEMA_VERSION,
        "stage": stage,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dict(config),
        "inputs": dict(inputs),
        "outputs": {named.get(p.resolve(), p.name): _entry(p) for p in sorted(folder.iterdir())},
        "metrics": dict(metrics),
        **(extra or {}),
        "environment": environment(),
    }
    write_json(folder / f"{stage}.json", result)
    _move(run, stage)
    return result


def _entry(path: Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": sha256_of(path), "size_bytes": _size(path)}


def settle(run: Path, stage: str) -> None:
    """Finishes the moves of a stage that was committed but stopped before all its files had their names.

    Where the process that committed it is still at that, or another finishes it already, waits for it.
    """
    folder = pending(run, stage)
    while (folder / f"{stage}.json").is_file():
        if (held := _locked(folder)) is None:
            time.sleep(0.01)
            continue
        try:
            _move(run, stage)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(held)


def _move(run: Path, stage: str) -> None:
    """Gives the files of a committed stage their names, the result last; the caller has the lock of their folder."""
    folder = pending(run, stage)
    result = folder / f"{stage}.json"
    if not result.is_file():
        return
    for path in [p for p in sorted(folder.iterdir()) if p != result]:
        if (run / path.name).is_dir():
            shutil.rmtree(run / path.name)
        path.replace(run / path.name)
    for name in _files(run / result.name) - _files(result):  # of another model than the one that is there now
        (run / name).unlink(missing_ok=True)
    result.replace(run / result.name)


def _files(result: Path) -> set[str]:
    """The files, not folders, that a result names; none where it cannot be read."""
    try:
        outputs = json.loads(result.read_text(encoding="utf-8"))["outputs"].values()
        return {Path(entry["file"]).name for entry in outputs if not (result.parent / entry["file"]).is_dir()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def mark_stale(run: Path, stage: str, reason: str) -> None:
    """Marks the older result of ``stage``, if there is one: its files stay, and are refused from now on."""
    if result := earlier(run, stage):
        write_json(run / f"{stage}.json", result | {"stale": reason})


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def has_result(run: Path, stage: str) -> bool:
    """Whether ``stage`` has been committed in ``run`` (its files are not checked)."""
    settle(run, stage)
    return (run / f"{stage}.json").is_file()


def read_result(run: Path, stage: str, *, verify: bool = True, stale: bool = False) -> dict[str, Any]:
    """The committed result of ``stage`` in ``run``, its outputs re-hashed unless ``verify`` is off.

    Raises QtoolError: the folder or result is missing, is no JSON, has another schema, was marked stale
    (unless ``stale`` allows it), or an output's hash is not the recorded one.
    """
    path = run / f"{stage}.json"
    while True:
        if not has_result(run, stage):
            there = ", ".join(s for s in STAGES if has_result(run, s)) or "none"
            raise QtoolError(
                f"run directory '{run}'", f"a finished '{stage}' stage ({path.name})", f"finished stages: {there}",
                f"run 'qtool {stage}' with this directory first",
            )  # fmt: skip
        result = _parsed(path, stage)
        if "stale" in result and not stale:
            raise QtoolError(
                f"'{path}'", "a current result", f"a stale one: {result['stale']}", f"run 'qtool {stage}' again"
            )
        try:
            for name in result["outputs"] if verify else ():
                output_path(run, result, name)
        except QtoolError:
            settle(run, stage)
            if _parsed(path, stage) == result:  # else another was committed meanwhile, and its files were read
                raise
        else:
            return result


def earlier(run: Path, stage: str) -> dict[str, Any] | None:
    """The result of a stage that may be done again, stale or not, its files as they are.

    None where there is none, or none that can be read: it is in nobody's way.
    """
    try:
        return read_result(run, stage, verify=False, stale=True) if has_result(run, stage) else None
    except QtoolError:
        return None


def _parsed(path: Path, stage: str) -> dict[str, Any]:
    try:
        result = from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(f"'{path}'", "a JSON result", error) from error
    except ValueError as error:
        raise QtoolError(f"'{path}'", "a JSON result", str(error), f"run 'qtool {stage}' again") from error
    schema = result.get("schema") if isinstance(result, dict) else type(result).__name__
    if schema != SCHEMA_VERSION:
        raise QtoolError(f"'{path}'", f"schema {SCHEMA_VERSION}", str(schema), f"run 'qtool {stage}' again")
    if lost := sorted(_lost(result)):
        raise QtoolError(f"'{path}'", "a whole result", f"no {', '.join(lost)}", f"run 'qtool {stage}' again")
    return dict(result)


def _lost(result: Mapping[str, Any]) -> Iterator[str]:
    """What every reader of a result counts on, and is not there or is of another type."""
    tables = ("config", "inputs", "outputs", "metrics")
    whole = [name for name in tables if isinstance(result.get(name), dict)]
    yield from {"stage", *tables} - {*whole, *(["stage"] if isinstance(result.get("stage"), str) else [])}
    for name, entry in result["outputs"].items() if "outputs" in whole else ():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("file", "sha256")):
            yield f"file and sha256 of output '{name}'"


@contextmanager
def whole(place: Path) -> Iterator[None]:
    """Tells results with something missing or of another kind as that: a stage writes them whole, an editor may not."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise QtoolError(
            f"'{place}'", "results as the stages wrote them", one_line(f"{type(error).__name__}: {error}"),
            "run the stage again whose JSON was edited; if none was, report this with its traceback (--debug)",
        ) from error  # fmt: skip


def output_path(run: Path, result: Mapping[str, Any], name: str) -> Path:
    """The verified path of one output of a result. Raises QtoolError when it is gone or was changed."""
    entry = result["outputs"].get(name)
    stage = result["stage"]
    if entry is None:
        raise QtoolError(
            f"'{run / (stage + '.json')}'", f"an output named '{name}'",
            ", ".join(result["outputs"]) or "none", f"run 'qtool {stage}' again",
        )  # fmt: skip
    path: Path = run / entry["file"]
    if not path.exists():
        raise QtoolError(f"'{path}'", "the file that the result records", "no file", f"run 'qtool {stage}' again")
    if (found := sha256_of(path)) != entry["sha256"]:
        raise QtoolError(
            f"'{path}'", f"sha256 {entry['sha256'][:12]}… as recorded in {stage}.json", f"{found[:12]}…",
            f"restore the file, or delete it and run 'qtool {stage}' again",
        )  # fmt: skip
    return path
