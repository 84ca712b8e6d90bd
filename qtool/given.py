"""Batches that a caller gives: (input, target) pairs, or inputs alone.

A batch is a pair where it is a tuple or list of two, and an input alone where it is one of one, as data loaders give
it. A model of two arguments without targets is therefore given dicts, or ``((first, second),)``. Something that can be
gone through only once is kept in memory, since calibration, timing and judging each go through it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qtool.errors import UsageError


def pairs_of(batches: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """(input, target) of each batch, again and again; the target is None where there is none."""
    return _Pairs(batches)


def inputs_of(batches: Iterable[Any]) -> Iterable[Any]:
    """The input of each batch, again and again."""
    return _Inputs(batches)


class _Pairs:
    def __init__(self, batches: Iterable[Any]) -> None:
        require_batches(batches)
        self.batches = list(batches) if iter(batches) is batches else batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            parts = tuple(batch) if isinstance(batch, tuple | list) and 1 <= len(batch) <= 2 else (batch,)
            yield parts if len(parts) == 2 else (parts[0], None)


class _Inputs(_Pairs):
    def __iter__(self) -> Iterator[Any]:
        return (value for value, _ in super().__iter__())


def require_batches(given: Any) -> None:
    """Raises UsageError for what is no iterable, or would be iterated sample by sample."""
    from torch import Tensor
    from torch.utils.data import Dataset, IterableDataset

    if isinstance(given, Tensor):
        raise UsageError("data", "an iterable of batches", "one tensor", "pass [tensor]")
    if isinstance(given, str | Mapping):
        got = f"a {type(given).__name__}"
        raise UsageError("data", "an iterable of batches", got, "pass a list of batches, or a DataLoader")
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        do = "wrap it in a DataLoader, or pass {'train': …, 'test': …}"
        raise UsageError("data", "batches, or a mapping of datasets", f"a {type(given).__name__} of single samples", do)
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        raise UsageError("data", "an iterable of batches", f"a {type(given).__name__}", "pass a list or a DataLoader")
