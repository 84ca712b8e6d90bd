"""Batches that a caller gives: (input, target) pairs, or inputs alone.

A batch is a pair where it is a tuple or list of two, and an input alone where it is one of one, as data loaders give
it. A model of two arguments without targets is therefore given dicts, or ``((first, second),)``. A dict by itself is
the model's keyword arguments and, as Hugging Face's tools have it, its target under ``labels`` (or ``label``, or
``label_ids``); texts in it are left out, and labels of tokens may be moved on (``labels.py``). For a model that takes
such an argument, give ``(dict,)`` or ``(dict, target)``. Arrays of numpy become tensors. Something that can be gone
through only once is kept in memory, since calibration, timing and judging each go through it again. Batches without
samples, as a stream's last one may be, are passed over.

What one pass found in a batch the next one looks up by the batch's place, so every pass has to meet the same batches. A
loader that shuffles or augments does, since each pass draws the same random numbers: those of torch, numpy and Python's
``random`` as they stood at first, and of the loader's own generators. The caller's are left as they are. A loader that
gives others all the same is refused: a batch is known by its checksum.

Left out on purpose: keeping batches, which would take the memory that streaming them saves.
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from qtool.data.labels import judged, moved_on
from qtool.errors import QtoolError, UsageError, kind_of

LABELS = ("labels", "label", "label_ids")
"""What the target is called in the dicts of Hugging Face's datasets and collators: of several, the first."""


def pairs_of(batches: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """(input, target) of each batch in host memory, again and again; the target is None where there is none."""
    return _Pairs(batches)


def inputs_of(batches: Iterable[Any]) -> Iterable[Any]:
    """The input of each batch in host memory, again and again."""
    return _Inputs(batches)


def pair_of(batch: Any, moved: bool | None = None) -> tuple[Any, Any]:
    """(input, target) of a batch or a sample; the target is None where it is an input alone.

    Labels of tokens are ``moved`` on by one place or not; without that, as they look by themselves.

    >>> pair_of([1, 2]), pair_of((1,)), pair_of((1, 2, 3))
    ((1, 2), (1, None), ((1, 2, 3), None))
    >>> pair_of({"x": 1, "labels": 2}), pair_of(({"x": 1, "labels": 2},)), pair_of({"x": 1, "y": 2})
    (({'x': 1}, 2), ({'x': 1, 'labels': 2}, None), ({'x': 1, 'y': 2}, None))
    """
    from qtool.nested import from_arrays

    batch = from_arrays(batch)
    if isinstance(batch, Mapping):
        return _labelled(batch, moved)
    parts = tuple(batch) if isinstance(batch, tuple | list) and 1 <= len(batch) <= 2 else (batch,)
    return (parts[0], parts[1] if len(parts) == 2 else None)


def _labelled(batch: Mapping[str, Any], moved: bool | None) -> tuple[Any, Any]:
    """(input, target) of a dict by itself: without texts, and with lists of numbers, as ``datasets`` gives them."""
    label = _label(batch)
    inputs = {name: _numbers(item) for name, item in batch.items() if name != label and not _leaf_is(item, str)}
    if label is None or not inputs:
        return {name: _numbers(item) for name, item in batch.items() if not _leaf_is(item, str)} or batch, None
    tokens, labels = token_labels(batch)
    verdict = judged([(tokens, labels)]) if moved is None else None
    return inputs, moved_on(tokens, labels, verdict.moved if verdict else bool(moved))


def _label(batch: Mapping[str, Any]) -> str | None:
    return next((name for name in LABELS if batch.get(name) is not None), None)


def token_labels(batch: Any) -> tuple[Any, Any]:
    """(tokens, labels) in a dict; None for what it does not have, and for tokens beside a decoder's own."""
    from qtool.nested import from_arrays

    if not isinstance(batch, Mapping) or (label := _label(batch)) is None:
        return None, None
    tokens = None if "decoder_input_ids" in batch else batch.get("input_ids")  # a decoder's are moved on already
    return _numbers(from_arrays(tokens)), _numbers(from_arrays(batch[label]))


def _leaf_is(item: Any, kind: type) -> bool:
    """Whether the first of what is in lists within lists, or what is in none, is of a kind."""
    while isinstance(item, list) and item:
        item = item[0]
    return isinstance(item, kind)


def _numbers(item: Any) -> Any:
    """A list of numbers, or of such lists, as a tensor; anything else as it is."""
    if not isinstance(item, list) or not _leaf_is(item, numbers.Number):
        return item
    import torch

    try:
        return torch.tensor(item)
    except (TypeError, ValueError):  # of lists that differ in length
        return item


def labelled(batches: Iterable[Any], moved: bool | None) -> Any:
    """Batches whose labels of tokens are ``moved`` on or not; the same batches where that is not known."""
    if moved is None:
        return batches
    if isinstance(batches, tuple | list):
        return [_with_target(batch, moved) for batch in batches]
    if isinstance(batches, Iterator):
        return (_with_target(batch, moved) for batch in batches)
    return _Labelled(batches, moved)


def _with_target(batch: Any, moved: bool) -> Any:
    """A dict by itself as (input, target); anything else as it is."""
    return pair_of(batch, moved) if isinstance(batch, Mapping) else batch


class _Labelled:
    """What else there is of ``batches``, its length and its sampler, is as it was."""

    def __init__(self, batches: Any, moved: bool) -> None:
        self.batches, self.moved = batches, moved

    def __iter__(self) -> Iterator[Any]:
        return (_with_target(batch, self.moved) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


class Reading:
    """Reads batches as pairs; by the first with labels of tokens it is decided whether all are moved on."""

    def __init__(self) -> None:
        self.moved: bool | None = None

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """(input, target) of a batch."""
        if self.moved is None and (verdict := judged([token_labels(batch)])):
            verdict.tell("data")
            self.moved = verdict.moved
        return pair_of(batch, self.moved)


class _Pairs:
    def __init__(self, batches: Iterable[Any]) -> None:
        require_batches(batches)
        self.batches: Iterable[Any] = list(batches) if isinstance(batches, Iterator) else batches
        if not isinstance(self.batches, tuple | list):
            self.batches = Repeated(self.batches)

    def __iter__(self) -> Iterator[Any]:
        from torch import Tensor

        from qtool.nested import map_tensors, tensors

        read = Reading()
        for batch in self.batches:
            inputs, target = read(batch)
            if next((len(value) for value in tensors(inputs) if value.dim()), 1):
                yield map_tensors(Tensor.cpu, (inputs, target))


class _Inputs(_Pairs):
    def __iter__(self) -> Iterator[Any]:
        return (value for value, _ in super().__iter__())


class Repeated:
    """Batches that are the same in every pass over ``batches``, whatever they draw.

    They draw from the random states that there are now, or, but for generators of their own, from those of a ``seed``.
    Raises QtoolError, while they are gone through, where a batch is another than in an earlier pass, or there are
    fewer.
    """

    def __init__(self, batches: Iterable[Any], seed: int | None = None) -> None:
        self.batches = batches
        self._states = _states(batches)
        now = _read(self._states)
        self._begin = now if seed is None else [*(seeded := _seeded(seed)), *now[len(seeded) :]]
        self._marks: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        from qtool.nested import checksum

        index = -1
        for index, batch in enumerate(self._drawn()):
            mark = checksum(batch)
            if index == len(self._marks):
                self._marks.append(mark)
            elif mark != self._marks[index]:
                raise _changed(f"another batch {index}")
            yield batch
        if index + 1 < len(self._marks):
            raise _changed(f"{index + 1} batches, after {len(self._marks)} before")

    def _drawn(self) -> Iterator[Any]:
        own = list(self._begin)
        with self._drawing(own):
            iterator = iter(self.batches)
        while True:
            with self._drawing(own):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def _drawing(self, own: list[Any]) -> Iterator[None]:
        """Has ``own`` states in place for the block, and what they have become in ``own`` behind it."""
        callers = _read(self._states)
        _write(self._states, own)
        try:
            yield
        finally:
            own[:] = _read(self._states)
            _write(self._states, callers)


def _changed(got: str) -> QtoolError:
    return QtoolError(
        "data", "the same batches each time they are gone through", got, "pass list(batches), which keeps them"
    )


States = list[tuple[Callable[[], Any], Callable[[Any], Any]]]


def _states(loader: Any) -> States:
    """How to read and to write each random state that a loader in this process may draw from."""
    import numpy as np
    import torch

    from qtool.system.generators import own_generators, put_back, state_of

    return [
        (torch.get_rng_state, torch.set_rng_state),
        (np.random.get_state, np.random.set_state),
        (random.getstate, random.setstate),
        *((partial(state_of, own), partial(put_back, own)) for own in own_generators(loader=loader).values()),
    ]


def _seeded(seed: int) -> list[Any]:
    """The random states of this process (those of torch, numpy and Python) as they are after seeding."""
    import numpy as np
    import torch

    generator = np.random.RandomState(seed % 2**32)
    return [torch.Generator().manual_seed(seed).get_state(), generator.get_state(), random.Random(seed).getstate()]


def _read(states: States) -> list[Any]:
    return [read() for read, _ in states]


def _write(states: States, values: list[Any]) -> None:
    for (_, write), value in zip(states, values, strict=True):
        write(value)


def require_batches(given: Any) -> None:
    """Raises UsageError for what is no iterable, or would be iterated sample by sample."""
    import numpy as np
    from torch import Tensor
    from torch.utils.data import Dataset, IterableDataset

    if isinstance(given, Tensor | np.ndarray):
        kind = "tensor" if isinstance(given, Tensor) else "array"
        raise UsageError("data", "an iterable of batches", f"one {kind}", f"pass [{kind}]")
    if got := columns_in(given):
        do = "pass [(inputs, targets)], or {'train': TensorDataset(inputs, targets), 'test': …}"
        raise UsageError("data", "an iterable of batches", got, do)
    if isinstance(given, str | Mapping):
        got = kind_of(given)
        raise UsageError("data", "an iterable of batches", got, "pass a list of batches, or a DataLoader")
    hub = hasattr(given, "column_names")  # a Dataset of Hugging Face's datasets
    if hub or (isinstance(given, Dataset) and not isinstance(given, IterableDataset)):
        do = "wrap it in a DataLoader, or pass {'train': …, 'test': …}"
        raise UsageError("data", "batches, or a mapping of datasets", f"{kind_of(given)} of single samples", do)
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        raise UsageError("data", "an iterable of batches", kind_of(given), "pass a list or a DataLoader")


def columns_in(given: Any) -> str | None:
    """What to call a list or tuple of whole columns, such as (inputs, targets), that is no list of batches or samples.

    Those are of one type and of as many axes each; columns have as many rows. None for anything else.
    """
    import numpy as np
    from torch import Tensor

    if not isinstance(given, tuple | list) or not all(isinstance(value, Tensor | np.ndarray) for value in given):
        return None
    if len({(value.dtype, value.ndim) for value in given}) < 2 or not all(value.ndim for value in given):
        return None
    lengths = {len(value) for value in given}
    return f"{len(given)} tensors of {lengths.pop()} rows each" if len(lengths) == 1 else None
