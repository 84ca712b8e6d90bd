"""What was chosen for the memory of a run, kept beside its checkpoints.

A batch that found its size, and techniques that a budget chose, belong to a training as its seed does: a run that is
resumed, with other memory free or on another machine, goes on with them, and nothing is predicted again. They are
kept for the command that asked for them, from the same inputs; of another one nothing is taken over. Nor does another
one take them away: it may be refused for the checkpoint that is there, whose own command goes on with its own choice.

Beside them is how often micro-batches were halved since, and, as long as a run is at work, how many processes the
system had killed for lack of host memory when it began. A run that ends by itself takes that note away. One that finds
it, and the system's count risen, was probably one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.recipe import TrainConfig, as_dict
from qtool.stored import fault_of, is_number
from qtool.system.json_files import write_json

if TYPE_CHECKING:
    from torch import nn

FILE = Path("checkpoints", "memory.json")
NOTE = Path("checkpoints", "running.json")
_WHERE = ("device", "devices")
_FREE = (*_WHERE, "checkpoint_every")
_KEPT: dict[str, Any] = {"asked": {}, "where": {}, "memory": {"chosen": {}}, "halvings": is_number}
"""What the file has to hold of each command."""


@dataclass(frozen=True)
class Choice:
    """What is trained; and for the result what of it was chosen and why, or None where nothing was left open."""

    config: TrainConfig
    memory: dict[str, Any] | None = None
    moved: bool = False
    """Whether it was chosen for another device, or another number of them."""


def recorded(folder: Path | None, asked: TrainConfig, inputs: Mapping[str, str]) -> Choice | None:
    """What was chosen for ``asked`` and these inputs in the run directory ``folder``."""
    wanted, found = _asked(asked, inputs), _read(folder, FILE)
    kept = next((one for one in _all(found) if one["asked"] == wanted), None)
    if kept is None:
        return None
    if folder and kept is not found:
        _put_first(folder, kept, found)
    memory, now = kept["memory"], as_dict(asked)
    return Choice(replace(asked, **memory["chosen"]), memory, kept["where"] != {key: now[key] for key in _WHERE})


def record(folder: Path | None, asked: TrainConfig, inputs: Mapping[str, str], memory: Mapping[str, Any]) -> None:
    """Keeps what was chosen for ``asked``, where there is a run directory to keep it in, before that of others."""
    if folder:
        where = {key: getattr(asked, key) for key in _WHERE}
        made = {"asked": _asked(asked, inputs), "where": where, "memory": dict(memory), "halvings": 0}
        _put_first(folder, made, _read(folder, FILE))


def _all(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the file holds for each command: first for the last one, whose halvings count."""
    return [found, *found["others"]] if found else []


def _put_first(folder: Path, kept: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    others = [{k: v for k, v in one.items() if k != "others"} for one in _all(found) if one["asked"] != kept["asked"]]
    write_json(folder / FILE, {**kept, "others": others})


def forget(folder: Path | None) -> None:
    """Takes away what an earlier run in ``folder`` left there."""
    for file in (FILE, NOTE) if folder else ():
        (folder / file).unlink(missing_ok=True)  # type: ignore[operator]


def halvings(folder: Path | None) -> int:
    """How often the micro-batches of the run in ``folder`` were halved for lack of memory."""
    return int(_read(folder, FILE).get("halvings", 0))


def halve(folder: Path, wanted: TrainConfig, begun: int, model: nn.Module) -> bool:
    """Has the next processes of the run in ``folder`` halve their micro-batches once more than the ``begun`` times.

    Several of a group may say so. False, and nothing is written, where they are as small as they can be already, where
    updates are made in the backward pass of a whole batch, or nothing was chosen yet.
    """
    from qtool.steps.step import fewest_samples

    kept = _read(folder, FILE)
    micro = math.ceil(math.ceil(wanted.batch_size / wanted.devices) / wanted.micro_batches)
    if not kept or wanted.step_in_backward or micro <= fewest_samples(model) << begun:
        return False
    write_json(folder / FILE, kept | {"halvings": begun + 1})
    (folder / NOTE).unlink(missing_ok=True)
    return True


@contextmanager
def at_work(folder: Path | None) -> Iterator[None]:
    """Inside the block the run in ``folder`` has a note that only a process that is killed leaves behind."""
    from qtool.system.devices import memory_kills

    kills = memory_kills()
    if folder is None or not kills:
        yield
        return
    write_json(folder / NOTE, {"boot": _boot(), "kills": kills})
    try:
        yield
    finally:
        ended(folder)


def ended(folder: Path) -> None:
    """Takes the note away of a run in ``folder`` that has ended, and not by a kill."""
    (folder / NOTE).unlink(missing_ok=True)


def was_killed(folder: Path | None) -> bool:
    """Whether the last run in ``folder`` ended without a word, and the system has killed for lack of memory since."""
    from qtool.system.devices import killed_since

    note = _read(folder, NOTE)
    kills = note.get("kills")
    return note.get("boot") == _boot() and isinstance(kills, dict) and killed_since(kills)


def _boot() -> str:
    """What tells one start of the system from the next, which counts anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _asked(config: TrainConfig, inputs: Mapping[str, str]) -> dict[str, Any]:
    options = {name: value for name, value in as_dict(config).items() if name not in _FREE}
    return dict(json.loads(json.dumps(options | {"inputs": dict(inputs)})))


def _read(folder: Path | None, file: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is not there, or damaged: then it is made anew."""
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return {} if fault_of(found, {**_KEPT, "others": [_KEPT]} if file == FILE else {}) else dict(found)
