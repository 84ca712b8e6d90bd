"""DataLoaders in the place of data sets: ``{"train": DataLoader(…), "test": DataLoader(…)}``.

A run that goes on where it was stopped, a share of each batch for each process, a held-out part and a calibration
sample all need samples that can be asked for by their place. So of a loader its dataset and its ``collate_fn`` are
taken, and batches are made here: of the stage's batch size, in an order drawn from the seed, in this process. That the
loader's batch size, ``drop_last`` and workers are not used is told by a warning. A loader that chooses samples in a way
of its own (weighted, a subset, distributed) is refused: to leave that out would train something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from qtool.data.samples import Samples
from qtool.errors import QtoolError, QtoolWarning, kind_of


def opened(spec: str, parts: Mapping[str, Any]) -> dict[str, Samples]:
    """The samples of each of ``parts``, map-style datasets or DataLoaders of them.

    Raises QtoolError for what is neither, and for a loader whose batches cannot be made from its dataset alone.
    """
    found = {part: _samples(f"data '{spec}', {part}", given) for part, given in parts.items()}
    if unused := [f"{part}'s {setting}" for part, given in parts.items() for setting in _unused(given)]:
        warnings.warn(
            f"data '{spec}': of its DataLoaders the datasets and collate functions are taken, batches are made by "
            f"--batch-size and --seed; not used: {', '.join(unused)}",
            QtoolWarning,
            stacklevel=2,
        )
    return found


def _samples(where: str, given: Any) -> Samples:
    if not isinstance(given, DataLoader):
        return Samples(where, given)
    if (own := _chooses(given)) is not None:
        raise QtoolError(
            where, "a DataLoader that goes through a map-style dataset, in order or shuffled", f"one with {own}",
            "give the dataset itself, as it is to be gone through, or that loader alone as the data to train on",
        )  # fmt: skip
    collate = given.collate_fn
    return Samples(where, given.dataset, collate=None if collate is default_collate else collate)


def _chooses(loader: DataLoader[Any]) -> str | None:
    """What of a loader decides on samples or batches, beside an order; None where nothing does."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset"
    if type(loader.batch_sampler) is not BatchSampler:
        return kind_of(loader.batch_sampler) if loader.batch_sampler else "batch_size=None"
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        if sampler.replacement:
            return "a RandomSampler that draws with replacement"
        return f"{sampler.num_samples} samples of each epoch" if sampler.num_samples != len(loader.dataset) else None  # type: ignore[arg-type]
    return None if type(sampler) is SequentialSampler else kind_of(sampler)


def _unused(given: Any) -> list[str]:
    if not isinstance(given, DataLoader):
        return []
    made: Any = given.batch_sampler
    settings = {"batch_size": made.batch_size, "drop_last": made.drop_last, "num_workers": given.num_workers}
    return [f"{name}={value}" for name, value in settings.items() if value]
