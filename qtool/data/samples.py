"""A user's own dataset, as the rest of qtool reads it: checked samples, stacked into batches.

Anything with ``__len__`` and ``__getitem__`` that gives (input, target), or an input alone, is a dataset. Inputs are
tensors, or tuples or dicts of tensors; numpy arrays and numbers are taken for tensors. An input alone is a tensor, an
array, a dict without labels in it, or a tuple of one, and its target is None: enough to calibrate, to compare and for
contracts on agreement. What is held in memory as tensors (a TensorDataset, or a Subset of one) is indexed in one go,
which is a hundred times faster than sample by sample. With a ``collate`` function, a DataLoader's, samples are whatever
that makes batches of.

A batch is summed to see whether it is finite: one pass at memory speed, since NaN and infinity survive a sum. Only
where the sum is not finite are the samples looked at one by one.
"""

from __future__ import annotations

import copy
import hashlib
import numbers
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from qtool.data.given import columns_in, pair_of, token_labels
from qtool.data.labels import Verdict, judged
from qtool.errors import QtoolError, QtoolWarning
from qtool.nested import map_tensors, raw_bytes, tensors

Collate = Callable[[list[Any]], Any]
JUDGED = 32
"""Samples by which it is decided whether labels of tokens are moved on."""
SLOW = 5.0
"""Seconds after which it is told that targets are read sample by sample, and how long the rest takes."""


class Samples(Dataset[tuple[Any, Any]]):
    """The samples of ``dataset``, or those at ``rows``; ``where`` names it in errors.

    ``collate`` makes a batch, (input, target) or an input alone, of a list of samples; else they are stacked.

    ``targets`` holds every class index (int64), or None where targets are no whole-number scalars.
    """

    def __init__(
        self, where: str, dataset: Any, rows: Sequence[int] | None = None, *, targets: Tensor | None = None,
        read_targets: bool = True, collate: Collate | None = None, verdict: Verdict | None = None,
    ) -> None:  # fmt: skip
        self.where, self.dataset, self.collate = where, dataset, collate
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, Mapping | str):
            got = type(dataset).__name__
            raise QtoolError(where, "a map-style dataset: __getitem__ and __len__", got, "return such an object")
        if columns := columns_in(dataset):
            do = "give torch.utils.data.TensorDataset(inputs, targets)"
            raise QtoolError(where, "a dataset of samples", columns, do)
        if not len(dataset):
            raise QtoolError(where, "at least one sample", "none", "add samples")
        self.rows = range(len(dataset)) if rows is None else rows
        self.tensors = _tensors(dataset) if collate is None else None
        self.verdict, self._has_token_labels = verdict, False
        self.targets = _targets(self) if read_targets else targets
        if self._has_token_labels:
            self.verdict = self._judged()

    def subset(self, rows: Sequence[int]) -> Samples:
        """The samples at ``rows`` of this one, which must be a whole dataset."""
        targets = None if self.targets is None else self.targets[torch.as_tensor(rows)]
        return Samples(
            self.where, self.dataset, rows, targets=targets, read_targets=False, collate=self.collate,
            verdict=self.verdict,
        )  # fmt: skip

    def judged_as(self, verdict: Verdict | None) -> Samples:
        """The same samples with another ``verdict`` on their labels of tokens."""
        same = copy.copy(self)
        same.verdict = verdict
        return same

    def _judged(self) -> Verdict | None:
        """What the first samples tell of their labels of tokens."""
        found = map(self._read, self.rows[:JUDGED])
        return judged(map(token_labels, found if self.collate is None else [self.collate(list(found))]))

    def _pair(self, item: Any) -> tuple[Any, Any]:
        if self.verdict:
            return pair_of(item, self.verdict.moved)
        self._has_token_labels |= judged([token_labels(item)]) is not None
        return pair_of(item)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.sample(self.rows[index])

    def sample(self, row: int) -> tuple[Any, Any]:
        """The sample at ``row`` of the dataset. Raises QtoolError where it is no pair, or the dataset raises."""
        if self.collate is not None:
            only: tuple[Any, Any] = map_tensors(lambda t: t[0] if t.dim() else t, self._collated([row]))
            return only
        sample = self._read(row)
        if isinstance(sample, Tensor | np.ndarray):
            return sample, None
        if isinstance(sample, Mapping) or (isinstance(sample, tuple | list) and 1 <= len(sample) <= 2):
            return self._pair(sample)
        got = f"{type(sample).__name__} of {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
        raise QtoolError(f"{self.where}[{row}]", "a pair (input, target), or an input", got, "return two values")

    def _read(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise QtoolError(f"{self.where}[{row}]", "a sample", got, "correct the dataset") from error

    def batch(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """The samples at ``indices`` in host memory, stacked or collated, and checked."""
        rows = [self.rows[i] for i in indices]
        inputs, targets = map_tensors(Tensor.cpu, self._batch(rows))
        self._check(inputs, rows)
        return inputs, targets

    def _batch(self, rows: list[int]) -> tuple[Any, Any]:
        if self.collate is not None:
            return self._collated(rows)
        if self.tensors:
            at = torch.as_tensor(rows)
            return self.tensors[0][at], self.tensors[1][at]
        samples = [self.sample(row) for row in rows]
        inputs = self._stack([value for value, _ in samples], rows)
        return inputs, self._stack([target for _, target in samples], rows, ", target")

    def _collated(self, rows: list[int]) -> tuple[Any, Any]:
        assert self.collate is not None
        samples = [self._read(row) for row in rows]
        try:
            inputs, targets = self._pair(self.collate(samples))
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise QtoolError(f"{self.where}[{rows[0]}]", "a batch by 'collate_fn'", got, "correct it") from error
        if not any(tensor.dim() for tensor in tensors(inputs)):
            raise QtoolError(
                f"{self.where}[{rows[0]}]", "tensors with a batch dimension from 'collate_fn', or tuples or dicts",
                type(inputs).__name__, "have it return (input, target), or an input",
            )  # fmt: skip
        return inputs, targets

    def _stack(self, values: list[Any], rows: list[int], part: str = "") -> Any:
        """``values``, those of the samples at ``rows``, as one; ``part`` says what of a sample they are."""
        first = values[0]
        if all(value is None for value in values):
            return None
        if isinstance(first, Mapping | tuple | list):
            self._require(list(map(_items, values)), rows, part, "give all samples the same items")
        if isinstance(first, Mapping):
            return {key: self._stack([value[key] for value in values], rows, f"{part}[{key!r}]") for key in first}
        if isinstance(first, tuple | list):
            columns = enumerate(zip(*values, strict=True))
            return tuple(self._stack(list(column), rows, f"{part}[{i}]") for i, column in columns)
        leaves = [self._tensor(value, f"{self.where}[{row}]{part}") for value, row in zip(values, rows, strict=True)]
        do = "resize or pad the samples to one shape, or give a DataLoader whose 'collate_fn' does"
        self._require([f"shape {tuple(leaf.shape)}" for leaf in leaves], rows, part, do)
        return torch.stack(leaves)

    def _require(self, found: list[str], rows: list[int], part: str, do: str) -> None:
        """Raises QtoolError for the first of the samples at ``rows`` of which something else is ``found``."""
        for got, row in zip(found, rows, strict=True):
            if got != found[0]:
                raise QtoolError(f"{self.where}[{row}]{part}", f"{found[0]}, as sample {rows[0]}", got, do)

    def _tensor(self, value: Any, where: str) -> Tensor:
        if isinstance(value, Tensor | np.ndarray | np.generic | numbers.Number):
            return torch.as_tensor(value)
        got = type(value).__name__
        raise QtoolError(where, "tensors, or tuples or dicts of them", got, "convert it to a tensor, or leave it out")

    def _check(self, inputs: Any, rows: list[int]) -> None:
        for tensor in tensors(inputs):
            if tensor.dtype == torch.float64:
                raise QtoolError(f"{self.where}[{rows[0]}]", "float32 inputs", "float64", "return x.float()")
            if tensor.is_floating_point() and not tensor.sum().isfinite():
                apart = tensor if tensor.dim() and len(tensor) == len(rows) else [tensor]
                for value, row in zip(apart, rows, strict=False):
                    if not value.isfinite().all():
                        raise QtoolError(f"{self.where}[{row}]", "finite inputs", "NaN or infinity", "clean the data")

    def content(self) -> str:
        """A sha256 of what can be read without running the user's code: targets, and inputs held in memory."""
        digest = hashlib.sha256(f"{len(self.dataset)}".encode())
        held: Sequence[Tensor] = _tensors(self.dataset) or [
            *tensors(getattr(self.dataset, "tensors", ())), *tensors((self.targets,)),
        ]  # fmt: skip
        if isinstance(self.dataset, tuple | list):
            held = [leaf for row in self.rows for leaf in tensors(self._batch([row]))]
        for tensor in held:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()


def _items(value: Any) -> str:
    """What a sample's value holds, in words that are the same for values that can be stacked."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted(map(repr, value)))}"
    return f"{len(value)} item{'s' * (len(value) != 1)}" if isinstance(value, tuple | list) else type(value).__name__


def _is(kind: Any, dataset: Any) -> bool:
    """Whether a dataset is of ``kind`` and gives its samples as that does: a class made from it may change them."""
    return isinstance(dataset, kind) and type(dataset).__getitem__ is kind.__getitem__


def _tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """(inputs, targets) of a dataset that is two tensors; None for any other."""
    if _is(TensorDataset, dataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0].cpu(), dataset.tensors[1].cpu()
    if _is(Subset, dataset) and (whole := _tensors(dataset.dataset)):
        at = torch.as_tensor(dataset.indices)
        return whole[0][at], whole[1][at]
    return None


def targets_of(dataset: Any, where: str = "data", collate: Collate | None = None) -> Tensor | None:
    """The class index of every sample as int64 (N), or None where targets are no whole-number scalars.

    Read from ``targets`` or from tensors where the dataset has them, else sample by sample; through ``collate`` and
    past a ``target_transform``, which may change them, always so. Where that takes seconds a QtoolWarning tells it.
    """
    if isinstance(dataset, Samples):
        return dataset.targets
    return _targets(Samples(where, dataset, read_targets=False, collate=collate))


def _targets(samples: Samples) -> Tensor | None:
    dataset = samples.dataset
    found = _stored(dataset) if samples.collate is None else None
    targets = _as_tensor(_collected(samples) if found is None else found)
    if targets is None or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return None
    return targets.to(torch.int64) if targets.shape == (len(dataset),) else None


def _stored(dataset: Any) -> Any:
    """The targets of all samples where the dataset, or what it is a part of or made of, has them; else None."""
    if _is(Subset, dataset):
        whole = _as_tensor(_stored(dataset.dataset))
        return None if whole is None or not whole.dim() else whole[torch.as_tensor(dataset.indices)]
    if _is(ConcatDataset, dataset):
        parts = [_as_tensor(_stored(part)) for part in dataset.datasets]
        known = [part for part in parts if part is not None and part.dim() == 1]
        return torch.cat(known) if len(known) == len(parts) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    tensors = _tensors(dataset)
    return getattr(dataset, "targets", tensors[1] if tensors else None)


def _as_tensor(values: Any) -> Tensor | None:
    """Numbers as a tensor in host memory; None for what are none."""
    try:
        return None if values is None else torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError):
        return None


def _tell_slow(where: str, row: int, total: int, seconds: float) -> None:
    left = seconds * (total - row) / row
    warnings.warn(
        f"{where}: targets are read from {total:,} samples one by one, {left:,.0f} more seconds or so, in every stage; "
        "give the dataset an attribute 'targets' with their class indices, and none is read for them",
        QtoolWarning,
        stacklevel=2,
    )


def _collected(samples: Samples) -> list[Any]:
    """All targets, or those up to the first that is no number: enough to see that they are no class indices."""
    found: list[Any] = []
    start, told = time.monotonic(), False
    for row in range(len(samples.dataset)):
        if not told and row and (spent := time.monotonic() - start) > SLOW:
            _tell_slow(samples.where, row, len(samples.dataset), spent)
            told = True
        target = samples.sample(row)[1]
        scalar = isinstance(target, numbers.Integral) or (getattr(target, "shape", None) == ())
        if not scalar:
            return []
        found.append(target)
    return found
