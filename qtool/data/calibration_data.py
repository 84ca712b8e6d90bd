"""Calibration data: which samples the ranges are read from, and the record that draws them again.

``--calibration`` names them in one of three ways:

=====================  =====================================================================================
``train:N``            N training samples drawn by the seed, stratified by label where there are labels
a name                 ``calibration/NAME.toml``, a recipe that comes with the package
a path ending .toml    a recipe of your own
=====================  =====================================================================================

A calibration recipe is a table with ``samples`` (how many), and optionally ``data`` (a data spec; the run's own
by default), ``part`` (``train`` or ``validation``; never ``test``, which is judged once) and ``seed``. Labels are
used to draw the samples evenly and for nothing else.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.data.given import Repeated
from qtool.errors import QtoolError, UsageError, nearest
from qtool.options import make, option
from qtool.recipe import SEED

if TYPE_CHECKING:
    from qtool.data.specs import Data

_PACKAGE = Path(__file__).parents[1]
FOLDERS = (_PACKAGE / "calibration", _PACKAGE.parent / "calibration")  # in a wheel, and in a checkout


@dataclass(frozen=True)
class CalibrationRecipe:
    """What a calibration recipe says."""

    samples: int = option(512, "how many samples", low=1)
    data: str | None = option(None, "data spec; the run's own data by default")
    part: str = option("train", "which part they are drawn from", choices=("train", "validation"))
    seed: int | None = option(None, "seed of the draw; the stage's own by default", low=0, high=SEED)


class Inputs:
    """Batches of inputs that can be gone through again and again, none of them kept in memory.

    A dataset that augments draws from the ``seed``, so that every pass meets the same inputs.
    """

    def __init__(self, dataset: Any, indices: list[int], batch_size: int, seed: int = 0) -> None:
        self.dataset, self.indices, self.batch_size = dataset, indices, batch_size
        self._same = Repeated(_Read(self), seed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._same)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)


@dataclass(frozen=True)
class _Read:
    """One pass over the samples, as the dataset gives them this time."""

    of: Inputs

    def __iter__(self) -> Iterator[Any]:
        from qtool.data.specs import batches

        return (inputs for inputs, _ in batches(self.of.dataset, self.of.batch_size, order=self.of.indices))


def draw(spec: str, data: Data | None, seed: int, batch_size: int) -> tuple[Inputs, dict[str, Any]]:
    """The batches that ``spec`` names, and the record of the draw.

    A set smaller than the number asked for is taken whole; the record says how many there were. Raises
    UsageError for a spec that names nothing, QtoolError for a set without samples.
    """
    recipe = read(spec)
    seed = seed if recipe.seed is None else recipe.seed
    opened = _open(recipe, data, spec)
    dataset = getattr(opened, recipe.part)
    if not len(dataset):
        raise QtoolError(f"calibration '{spec}'", "at least one sample", "an empty set", "choose other data")
    return _drawn(dataset, recipe, seed, batch_size, {"spec": spec, "data": opened.identity})


def _drawn(
    dataset: Any, recipe: CalibrationRecipe, seed: int, batch_size: int, record: dict[str, Any]
) -> tuple[Inputs, dict[str, Any]]:
    from qtool.data.specs import stratified_sample

    indices = stratified_sample(dataset, min(recipe.samples, len(dataset)), seed)
    digest = hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()
    drawn = {"part": recipe.part, "seed": seed, "num_samples": len(indices), "indices_sha256": digest}
    return Inputs(dataset, indices, batch_size, seed), record | drawn | {"num_asked": recipe.samples}


def _open(recipe: CalibrationRecipe, data: Data | None, spec: str) -> Data:
    from qtool.data.specs import load_data

    if recipe.data is not None:
        return load_data(recipe.data)
    if data is None:
        raise UsageError(f"calibration '{spec}'", "data to draw from", "none", "pass --data, or name it in the recipe")
    return data


def read(spec: str) -> CalibrationRecipe:
    """What ``spec`` asks for. Raises UsageError with the nearest name for one that means nothing."""
    part, colon, count = spec.partition(":")
    if colon and part == "train":
        return make(CalibrationRecipe, {"samples": _count(spec, count)})
    path = Path(spec) if spec.endswith(".toml") else _shipped(spec)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"calibration '{spec}'", "a readable TOML file", str(error), "check the file") from error
    return make(CalibrationRecipe, table, lambda key: f"calibration '{spec}', key '{key}'")


def _count(spec: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"calibration '{spec}'", "train:N with N of at least 1", repr(text), "write train:512")
    return int(text)


def _shipped(name: str) -> Path:
    known = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.toml"))}
    if name not in known:
        do = f"write train:{name}" if name.isdecimal() else nearest(name, ["train:512", *known])
        raise UsageError(f"calibration '{name}'", "train:N, a set's name or a .toml file", "none of these", do)
    return known[name]


def sample_hashes(batches: Iterable[Any]) -> Iterator[str]:
    """The sha256 of every sample's bytes, over all tensors of its input, in order."""
    from qtool.nested import num_samples, samples_of, tensors

    for batch in batches:
        for index in range(num_samples(batch)):
            digest = hashlib.sha256()
            for tensor in tensors(samples_of(batch, index, index + 1)):
                value = tensor.detach().cpu().contiguous().numpy()
                digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
            yield digest.hexdigest()
