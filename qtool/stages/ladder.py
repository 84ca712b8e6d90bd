"""The ladder: techniques one on top of the other, each rung predicted, measured and trained in a process of its own.

A rung changes some fields of the config of the rung below. For each, the peak of a step is predicted here, and a fresh
process measures it, trains for as long as the config says, and reports the median time from one step to the next, the
samples per second, the last training loss and the test metrics. A rung that this model cannot take, or that runs
out of memory, says so and the next one is tried on top of it all the same; where none can be taken the first one's
error is that of the ladder, and an older ladder's files stay. Trained from several seeds, each in a
process of its own, a rung has the means of loss and metrics.

A ladder is a TOML file: ``model``, ``data`` and ``task``, a ``[train]`` table for what all rungs share, and one
``[[rungs]]`` table each with ``name``, ``set`` (the changes) and, where there are any, ``published`` figures, which are
shown beside the measured ones and used for nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from qtool.errors import QtoolError, UsageError, nearest, one_line
from qtool.options import make
from qtool.recipe import TrainConfig, as_dict
from qtool.stages.common import AnyPath, Progress, teller, writable
from qtool.stages.memory import predict_memory, require_named, trained
from qtool.system.files import atomic_path
from qtool.system.json_files import write_json
from qtool.system.machine import environment

DEFAULT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as given", {}),
    ("bf16-mixed", {"precision": "bf16-mixed"}),
    ("bf16-true, stochastic rounding", {"precision": "bf16-true", "rounding": "stochastic"}),
    ("8-bit AdamW", {"optimizer": "adamw8bit"}),
    ("step in backward", {"step_in_backward": True, "grad_clip": None}),
    ("activation checkpointing", {"activation_checkpointing": True}),
)
_KEYS = ("model", "data", "task", "train", "rungs")
_RUNG = ("name", "set", "published")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: its name, what it changes, and figures published for it elsewhere."""

    name: str
    changes: dict[str, Any]
    published: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ladder:
    """The rungs, the config below the first, and the source, as far as the file names them."""

    source: dict[str, str]
    config: TrainConfig
    rungs: tuple[Rung, ...]


def load_ladder(path: Path) -> Ladder:
    """Reads a ladder's TOML. Raises UsageError for what is not understood."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"ladder '{path}'", "a TOML file", one_line(error), "check the path and that line") from error
    for key in table:
        if key not in _KEYS:
            raise UsageError(f"ladder key '{key}'", "a known key", repr(key), nearest(key, _KEYS))
    rungs = tuple(_read(rung) for rung in table.get("rungs", ()))
    if not rungs:
        raise UsageError(f"ladder '{path}'", "a rung or more", "none", 'write [[rungs]], name = "…" for each')
    ladder = Ladder(
        {k: table[k] for k in ("model", "data", "task") if k in table}, make(TrainConfig, table.get("train", {})), rungs
    )
    configs(ladder)
    return ladder


def _read(table: Any) -> Rung:
    """A rung of the file. Raises UsageError for one without a name, or with a key that is not known."""
    if not isinstance(table, dict) or "name" not in table:
        raise UsageError(
            "ladder key 'rungs'", "tables that each have a name", repr(table), 'write [[rungs]], name = "…"'
        )
    for key in table:
        if key not in _RUNG:
            raise UsageError(f"rung '{table['name']}'", "known keys", repr(key), nearest(key, _RUNG))
    return Rung(table["name"], table.get("set", {}), table.get("published", {}))


def configs(ladder: Ladder) -> list[TrainConfig]:
    """The config of each rung: that of the rung below, with its changes. Raises UsageError for an unknown field."""
    found, values = [], as_dict(ladder.config)
    for rung in ladder.rungs:
        values = values | rung.changes
        found.append(make(TrainConfig, values, lambda key, rung=rung: f"rung '{rung.name}', '{key}'"))  # type: ignore[misc]
    return found


def climb(
    ladder: AnyPath | None,
    *,
    model: str | None = None,
    data: str | None = None,
    task: str | None = None,
    out: AnyPath | None = None,
    seeds: int = 1,
    progress: Progress = False,
    **options: Any,
) -> dict[str, Any]:
    """Climbs the ladder of a file, or the one above over ``model`` and ``data``; ``options`` go over its config.

    Each rung is trained from ``seeds`` seeds, beginning with the config's.
    Returns, and writes to ``out/ladder.json`` and ``out/ladder.svg``, plain values for each rung: predicted and
    measured peak in bytes, seconds per step, samples per second, loss and metrics. Raises the first rung's QtoolError
    where no rung can be taken.
    """
    wanted = load_ladder(Path(ladder)) if ladder else Ladder({}, TrainConfig(), tuple(Rung(*r) for r in DEFAULT))
    named = {"model": model, "data": data, "task": task}
    source = {"task": "classification"} | wanted.source | {k: v for k, v in named.items() if v is not None}
    if missing := [key for key in ("model", "data") if key not in source]:
        raise UsageError("--ladder", "a model and data", f"no {missing[0]}", f"pass --{missing[0]}")
    wanted = replace(wanted, config=make(TrainConfig, as_dict(wanted.config) | options))
    require_named(wanted.config)
    folder, tell = writable(out), teller(progress)
    rungs: list[dict[str, Any]] = []
    failed: list[QtoolError] = []
    for rung, config in zip(wanted.rungs, configs(wanted), strict=True):
        tell(f"{rung.name} …")
        found = {"name": rung.name, "changes": rung.changes, "published": rung.published}
        try:
            rungs.append(found | _rung(config, source, seeds))
        except QtoolError as error:
            tell(f"{rung.name}: {'the same' if failed and str(failed[-1]) == str(error) else error}")
            rungs.append(found | {"failed": str(error)})
            failed.append(error)
    if len(failed) == len(rungs):
        raise failed[0]
    result = {"ladder": str(ladder or "default"), "source": source, "environment": environment(), "rungs": rungs}
    if folder:
        _write(folder, result)
    return result


def _rung(config: TrainConfig, source: dict[str, str], seeds: int) -> dict[str, Any]:
    known = predict_memory(**source, config=config, measure=True, train=True)
    others = [trained(source, replace(config, seed=config.seed + k)) for k in range(1, seeds)]
    found = {"predicted_bytes": known["predicted"]["peak_bytes"], "error": known["error"], **known["measured"]}
    found |= {"samples_per_s": config.batch_size / found["seconds_per_step"]}
    runs = [{"loss": run["loss"], "metrics": run["metrics"]} for run in (known["measured"], *others)]
    names = found["metrics"]
    means = {name: fmean(run["metrics"][name] for run in runs) for name in names}
    return found | {"seeds": runs, "loss": fmean(run["loss"] for run in runs), "metrics": means}


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    from qtool.reporting.ladder import picture

    write_json(folder / "ladder.json", result)
    with atomic_path(folder / "ladder.svg") as temporary:
        temporary.write_text(picture(result["rungs"]), encoding="utf-8")
