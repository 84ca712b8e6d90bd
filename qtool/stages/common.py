"""What the stages share: their configuration, whether one is already done, and where lines about it go."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from qtool.artifacts import alone, earlier, output_path
from qtool.data.calibration_data import draw
from qtool.data.given import inputs_of, pairs_of
from qtool.errors import QtoolError, UsageError, kind_of
from qtool.options import argument, make, require_config
from qtool.recipe import QuantizeConfig
from qtool.source import UNIDENTIFIED, Source
from qtool.stages.surroundings import Parameters, Result, apart, exact
from qtool.system.files import path_of, require_writable
from qtool.system.quiet import bar_console
from qtool.system.turns import taking_turns

Config = TypeVar("Config")
AnyPath = str | Path
Progress = bool | Callable[[str], None]


def in_turn(stage: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A stage that captures graphs, and waits for its turn. See :func:`apart` and :func:`exact` too."""
    return taking_turns(apart(exact(stage)))


def configured(kind: type[Config], config: Config | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Config:
    """The config given whole, also as a mapping, or one made from keyword arguments; both at once is a mistake."""
    if config is not None and options:
        raise UsageError(argument("config"), "either config or keyword arguments", "both", "leave one out")
    if config is None or isinstance(config, Mapping):
        return make(kind, options if config is None else config, argument)
    return require_config(kind, config, argument("config"))


def finished(
    run: Path, stage: str, config: Mapping[str, Any], inputs: Mapping[str, str],
    tell: Callable[[str], None] = lambda text: None,
) -> bool:  # fmt: skip
    """Whether ``stage`` was committed in ``run`` with this configuration, from these inputs, and all files are there.

    ``tell`` takes a line that says so, or what has changed since. Raises QtoolError for an output that was changed: it
    is not used, and not overwritten unasked.
    """
    result = earlier(run, stage)
    if result is None or UNIDENTIFIED in inputs.values():
        return False
    gone = [entry["file"] for entry in result["outputs"].values() if not (run / entry["file"]).exists()]
    changed = [*_changed(result["inputs"], inputs), *_changed(result["config"], json.loads(json.dumps(config)))]
    if "stale" in result or gone or changed:
        reason = (
            f"{', '.join(dict.fromkeys(changed))} changed" if changed else result.get("stale", f"'{gone[0]}' is gone")
        )
        tell(f"{stage}: again, since {reason}")
        return False
    for name in result["outputs"]:
        output_path(run, result, name)
    tell(f"{stage}: as it is in '{run}', finished with the same settings")
    return True


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of two mappings whose values differ, those of a table in them with dots.

    None is as good as nothing there: an option that is left out, and that an earlier version did not have.
    """
    for name in dict.fromkeys((*now, *before)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name


def teller(progress: Progress) -> Callable[[str], None]:
    """What takes a line about where a stage is: standard error, the caller's function, or nothing.

    Raises UsageError for anything else.
    """
    if progress is True:
        return lambda text: print(text, file=sys.stderr, flush=True)
    if not progress:
        return lambda text: None
    if not callable(progress):
        expected = "True, False, or a function that takes a line"
        raise UsageError(argument("progress"), expected, kind_of(progress), "pass for example progress=print")
    return progress


@contextmanager
def meter(progress: Progress, stage: str) -> Iterator[Callable[[str, int, int], None]]:
    """What takes how far something is (what, parts done, parts in all): a bar on standard error, a line, or nothing."""
    if progress is not True:
        tell = teller(progress)
        yield lambda what, done, total: tell(f"{stage}: {what} ({done} of {total})")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # the description goes on in further lines where one is too short, and takes no room from the rest
    what = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1))
    columns = (BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(), what)
    console = bar_console()
    with Bar(*columns, console=console, expand=True, disable=not (console.is_terminal or console.is_jupyter)) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda what, done, total: bar.update(
            task, completed=done, total=total, description=what, visible=done < total
        )
        bar.update(task, visible=False)


def run_of(what: Any) -> Any:
    """The run directory that :func:`export` left its files in, for what it returned; anything else as it is."""
    return getattr(what, "folder", what)


def folder_of(out: object) -> Path:
    """``out`` as a path that stays, whatever becomes the current folder. Raises UsageError for what is none."""
    return path_of(out, argument("out"), "the path of a folder", "name a folder").absolute()


def writable(out: AnyPath | None) -> Path | None:
    """``out`` as :func:`folder_of` has it, looked at before any work is done, as it was given.

    Raises UsageError where no folder can be made there.
    """
    if out is None:
        return None
    folder = folder_of(out)
    require_writable(Path(out))
    return folder


@contextmanager
def tidy(run: Path | None) -> Iterator[None]:
    """Takes away the folders that a stage made and left empty when it failed."""
    try:
        yield
    except BaseException:
        for folder in (run / "checkpoints", run) if run else ():
            with suppress(OSError):  # it is not empty, or another of several processes was first
                folder.rmdir()
        raise


@contextmanager
def checkpointing(run: Path | None, stage: str) -> Iterator[None]:
    """Keeps the checkpoints of ``run`` for this process: those of two trainings would be taken for one's.

    Another that trains there waits a moment, and is then refused with QtoolError.
    """
    if run is None:
        yield
        return
    with alone(run / "checkpoints", stage):
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty, or was taken away
                (run / "checkpoints").rmdir()


def required_folder(out: AnyPath | None) -> Path:
    """``out`` as a path, which this use of the stage cannot do without."""
    folder = writable(out)
    if folder is None:
        raise UsageError(argument("out"), "a folder for the files", "none", "pass out=…")
    return folder


def seen_from(run: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a source with the training it came from as a path relative to ``run``: the two move together."""
    trained = record.get("trained_in")
    return dict(record) | ({"trained_in": os.path.relpath(trained, run.resolve())} if trained else {})


def drop_checkpoints(run: Path) -> None:
    """Takes the scaffolding away: a committed stage is not resumed, and the next one must not find its steps."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def anywhere(config: QuantizeConfig) -> QuantizeConfig:
    """``config`` with its paths made absolute: later stages read them again, from whatever folder they are run in."""
    calibration, ranges = config.calibration, config.ranges_from
    return dataclasses.replace(
        config, calibration=str(Path(calibration).resolve()) if calibration.endswith(".toml") else calibration,
        ranges_from=str(Path(ranges).resolve()) if ranges else None,
    )  # fmt: skip


def calibration_of(config: QuantizeConfig, source: Source) -> tuple[Iterable[Any], dict[str, Any]]:
    """Batches of calibration inputs, and the record of where they came from."""
    if source.data is not None and source.parts is None:
        return inputs_of(source.data), {"spec": None}
    return draw(config.calibration, source.parts, config.seed, config.calibration_batch_size)


def targets_in(source: Source) -> Any:
    """The targets of a few samples; None where there are none, or where looking would use batches up."""
    if source.parts is not None:
        from qtool.data.specs import batches

        return next(batches(source.parts.train, 2))[1]
    if source.data is None or iter(source.data) is source.data:
        return None
    return next(iter(pairs_of(source.data)), (None, None))[1]


def example_of(source: Source, inputs: Iterable[Any]) -> Any:
    """A batch of two inputs for capture, from the data or the first calibration batch with samples in it."""
    if source.parts is not None:
        from qtool.data.specs import example_input

        return example_input(source.parts)
    from qtool.nested import tensors

    for batch in inputs:
        if next((len(value) for value in tensors(batch) if value.dim()), 1):
            return batch
    raise QtoolError("calibration", "at least one batch", "none", "pass batches of inputs")
