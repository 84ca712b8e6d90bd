"""The order of the training data, and how a run that was stopped finds its place in it again.

The order of an epoch over a map-style data set is a permutation drawn from (seed, epoch) alone, so any
place in it can be had without what came before. An iterable of batches (a DataLoader, say) draws its own
order from the global generators, or from some of its own (``qtool.system.generators``); it is started again with the
generators as they were when the epoch began, and moved forward over the batches that were seen. What workers draw that
outlive an epoch (``persistent_workers``) nobody can put back: such batches come in the same order, and may be augmented
otherwise.

Several processes cut each batch of a data set between them, in its order: the batches are those of one
process. An iterable of batches has one order for each process, and is refused there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qtool.data.given import Reading
from qtool.data.specs import batches
from qtool.errors import QtoolError, UsageError, kind_of, one_line
from qtool.nested import num_samples, tensors
from qtool.recipe import TrainConfig
from qtool.system import generators, processes
from qtool.system.generators import own_generators

LOOKED_AT, SAMPLES_READ = 8, 1024
"""Batches that are read at most to find a large one, and the samples that they may have together."""


@dataclass(frozen=True)
class Batches:
    """An iterable of batches in the place of a data set; each epoch iterates it anew."""

    batches: Iterable[Any]

    def __len__(self) -> int:
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except TypeError as error:  # a DataLoader has a length if its data set has
            raise UsageError(
                "training batches", "an iterable with a length", f"{kind_of(self.batches)} without one",
                "pass a list, a DataLoader of a map-style data set, or an object with __len__ and __iter__",
            ) from error  # fmt: skip

    @property
    def generators(self) -> dict[str, Any]:
        """Those that it has for itself."""
        return own_generators(train=self)

    def start_workers(self) -> None:
        """Starts those of a DataLoader that stay for all epochs, and leaves generators as they are.

        To start them draws a number, so an epoch that finds them begins elsewhere than one that has to start them.
        """
        if getattr(self.batches, "persistent_workers", False) and getattr(self.batches, "_iterator", self) is None:
            now = generators.rng_state(self.generators)
            iter(self.batches)
            generators.set_rng_state(now, self.generators)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        read = Reading()
        return (_checked(*read(batch)) for batch in _from_workers(self.batches))


def _from_workers(batches: Iterable[Any]) -> Iterator[Any]:
    """``batches``. Raises QtoolError where a process that was to load them has ended."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise QtoolError(
            "training batches", "a DataLoader's workers to run to their end", one_line(error),
            "see what they said: num_workers=0 shows it, and a script needs `if __name__ == '__main__':` to start them",
        ) from error  # fmt: skip


def _checked(value: Any, target: Any) -> tuple[Any, Any]:
    """(input, target) of a batch as it is. Raises QtoolError for one without tensors, or without samples."""
    if not any(tensor.dim() for tensor in tensors(value)):
        raise QtoolError(
            "training batches", "tensors with a batch dimension, or tuples or dicts of them", type(value).__name__,
            "convert inputs with torch.as_tensor, and stack samples into batches",
        )  # fmt: skip
    if not num_samples(value):
        raise QtoolError("training batches", "samples in each", "a batch without any", "leave it out")
    return value, target


def batch_plan(count: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The positions of each batch of an epoch: a permutation drawn from (seed, epoch), cut into batches.

    The last batch may be short, but a single left-over sample joins the batch before it, since batch-norm
    cannot train on one value per channel.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    order = torch.randperm(count, generator=generator).tolist()
    plan = [order[start : start + batch_size] for start in range(0, count, batch_size)]
    if len(plan) > 1 and len(plan[-1]) == 1 < batch_size:
        left_over = plan.pop()
        plan[-1] += left_over
    return plan


def largest_pass(count: int, config: TrainConfig) -> int:
    """The samples of the largest batch that a step over ``count`` samples takes as ``config`` says, to predict it.

    One that a left-over sample has joined is cut in two, but where updates are made in the backward pass.
    """
    joined = config.step_in_backward and 1 < config.batch_size < count and count % config.batch_size == 1
    return config.batch_size + joined


def largest_seen(train: Any, given: Any, config: TrainConfig) -> tuple[tuple[Any, Any], int]:
    """A batch to predict a step by: of ``train``, of as many samples as :func:`largest_pass` says, or one ``given``.

    Where batches differ in size, as those of sequences do, it is the largest of those that are looked at: all of a
    list, else the first few. Beside it is of how many it is the largest, 1 where they do not differ. Generators are
    left as they were. Raises QtoolError where there is none.
    """
    data: Any = Batches(given) if train is None else train
    size = 0 if train is None else largest_pass(len(train), config)
    most = None if isinstance(given, list | tuple) else max(1, min(LOOKED_AT, SAMPLES_READ // max(1, size)))
    if train is not None and getattr(train, "collate", None) is None:  # samples that are stacked are of one size
        most = 1
    own = own_generators(train=data)
    now = generators.rng_state(own)
    batch: tuple[Any, Any] | None = None
    sizes: list[int] = []
    for other in itertools.islice(iter(data) if train is None else batches(train, size), most):
        found = sum(tensor.nbytes for tensor in tensors(other))
        batch = other if found > max(sizes, default=-1) else batch
        sizes.append(found)
    generators.set_rng_state(now, own)
    if batch is None:
        raise QtoolError("training data", "at least one batch", "none", "give data that is not empty")
    return batch, len(sizes) if len(set(sizes)) > 1 else 1


def not_shared() -> UsageError:
    """What is wrong with an iterable of batches where several processes train."""
    return UsageError(
        "training data", "samples that several processes can share", "an iterable of batches",
        "pass {'train': …, 'test': …} of map-style data sets, or train on one device",
    )  # fmt: skip


class Order:
    """The training batches of every epoch; ``num_batches`` in each."""

    def __init__(self, train: Any, batch_size: int, seed: int) -> None:
        self.train: Any = train
        self.batch_size, self.seed = batch_size, seed
        if isinstance(train, Batches) and processes.size() > 1:
            raise not_shared()
        self.num_batches = len(train) if isinstance(train, Batches) else len(self._plan(0))
        if not self.num_batches:
            raise QtoolError("training data", "at least one sample", "none", "check the data")

    def _plan(self, epoch: int) -> list[list[int]]:
        return batch_plan(len(self.train), self.batch_size, self.seed, epoch)

    def sizes(self, most: int) -> set[int]:
        """The sizes of the first ``most`` batches of an epoch, which all epochs have; of given batches, none."""
        return set() if isinstance(self.train, Batches) else set(map(len, self._plan(0)[:most]))

    def epoch(self, epoch: int, start: int, stop: int, began: Mapping[str, Any]) -> Iterator[tuple[Any, Any, int]]:
        """Batches ``start`` … ``stop``-1 of an epoch at whose beginning the generators were in state ``began``.

        Yields this process's share of each, and the size of the whole. A process whose share is empty gets a sample.
        """
        if isinstance(self.train, Batches):
            if epoch:
                self.train.start_workers()
            yield from self._given(start, stop, began)
            return
        for positions in self._plan(epoch)[start:stop]:
            share = processes.share(len(positions))
            own = positions[share.start : share.stop] or positions[:1]
            for value, target in batches(self.train, len(own), order=own):
                yield value, target, len(positions)

    def _given(self, start: int, stop: int, began: Mapping[str, Any]) -> Iterator[tuple[Any, Any, int]]:
        iterator, place = self._replayed(start, began) if start else iter(self.train), start
        for value, target in itertools.islice(iterator, stop - start):
            yield value, target, num_samples(value)
            place += 1
        if place < stop:
            raise QtoolError(
                "training batches", f"{self.num_batches} in each epoch, as their length says", f"{place} in this one",
                "pass an object whose __iter__ begins anew each time",
            )  # fmt: skip

    def _replayed(self, start: int, began: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        own = self.train.generators
        now = generators.rng_state(own)
        generators.set_rng_state(began, own)
        iterator: Iterator[tuple[Any, Any]] = iter(self.train)
        next(itertools.islice(iterator, start - 1, None), None)
        generators.set_rng_state(now, own)
        return iterator
