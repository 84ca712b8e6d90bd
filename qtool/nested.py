"""Inputs, targets and outputs of any shape: a tensor, or tuples, lists, mappings and dataclasses of them.

A dataset's input may be one tensor, a tuple for a model of several arguments, or a dict for a model of
keyword arguments; a model's output may be a named tuple, a dataclass or one of transformers' outputs. These few
functions treat all of them alike, so that nothing above asks which it is. The first dimension of every tensor is the
batch, but in a list of samples (one dict of boxes for each image, say).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.errors import QtoolError

NARROW = (torch.float16, torch.bfloat16)
"""Floating-point types of 16 bits."""


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each tensor in it; containers keep their type and order."""
    if isinstance(value, Tensor):
        return function(value)
    return _rebuilt(value, lambda item: map_tensors(function, item))


def packed(structure: Any, values: Iterable[Any]) -> Any:
    """``structure`` with ``values`` in the places of its tensors, in their order.

    >>> packed({"logits": torch.zeros(2), "states": (torch.zeros(1), None)}, [3, 4])
    {'logits': 3, 'states': (4, None)}
    """
    left = iter(values)
    return map_tensors(lambda _: next(left), structure)


def from_arrays(value: Any) -> Any:
    """``value`` with tensors for numpy's arrays of numbers, over the same memory where that is possible.

    Tensors that were made in inference mode, or ask for gradients, become such as can be learned from.
    """
    if isinstance(value, Tensor):
        value = value.clone() if value.is_inference() else value
        return value.detach() if value.requires_grad else value
    if isinstance(value, np.ndarray):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError):  # objects, words; steps backwards
            return value if value.dtype.kind not in "iufb" else torch.as_tensor(value.copy())
    return _rebuilt(value, from_arrays)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with each of its items changed; anything else as it is."""
    if isinstance(value, Mapping):
        return _with_items(value, {key: change(item) for key, item in value.items()})
    if isinstance(value, tuple | list):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_record(value):
        made = copy.copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, change(getattr(value, field.name)))  # it may be frozen
        return made
    return value


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """``items`` in a mapping of the type of ``value``. Transformers' outputs have them as attributes too."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, with the key, the field's name or the place of each; nothing of anything else.

    >>> list(entries({"logits": 1})), list(entries([2, 3])), list(entries("text"))
    ([('logits', 1)], [(0, 2), (1, 3)], [])
    """
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    return [(field.name, getattr(value, field.name)) for field in fields(value)] if _is_record(value) else []


def tensors(value: Any) -> Iterator[Tensor]:
    """Each tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, item in entries(value):
        yield from tensors(item)


def named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is in a mapping of arguments, also by the names that ``torch.export`` gives it: the keys on the way there.

    >>> named({"X": 1, "more": {"text-embeds": 2, "ids": (3, 4)}})
    {'x': 1, 'more_text_embeds': 2, 'more_ids_0': 3, 'more_ids_1': 4, 'X': 1, 'more': {'text-embeds': 2, 'ids': (3, 4)}}
    """
    spelled = (
        ("_".join(re.sub("[^a-zA-Z0-9]", "_", str(key)) for key in path), leaf) for path, leaf in leaves(arguments)
    )
    return {**{name.lower(): leaf for name, leaf in spelled}, **arguments}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is in ``value`` and holds nothing itself, with the keys, fields and places on the way there, save None.

    >>> list(leaves({"x": 1, "more": (2, None)}))
    [(('x',), 1), (('more', 0), 2)]
    """
    if not isinstance(value, Mapping | tuple | list) and not _is_record(value):
        if value is not None:
            yield path, value
        return
    for key, item in entries(value):
        yield from leaves(item, (*path, key))


def num_samples(value: Any) -> int:
    """The size of the first dimension of the first tensor in ``value``. Raises ValueError where there is none."""
    for tensor in tensors(value):
        if tensor.dim():
            return tensor.shape[0]
    raise ValueError("no tensor with a batch dimension")


def per_sample(value: Tensor) -> Tensor:
    """A batch of anything as samples × numbers; one number a sample where ``value`` has no second dimension.

    A single number is that of one sample.
    """
    return value.reshape(len(value) if value.dim() else 1, -1)


def samples_of(value: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, value)


def repeated(value: Tensor, axis: int, size: int) -> Tensor:
    """A tensor of another size of an axis: the beginning of it, over and over again; as it is without that axis."""
    if value.dim() <= axis:
        return value
    return value.index_select(axis, torch.arange(size, device=value.device) % value.shape[axis])


class Thinned:
    """Some of the batches that are added: ``most`` samples, or down to half as many of more, the same share of each."""

    def __init__(self, most: int) -> None:
        self._most, self._total, self._step = most, 0, 1
        self._kept: list[tuple[int, int, Any]] = []

    def add(self, batch: Any) -> None:
        """Adds a batch, behind those that were added before."""
        size = num_samples(batch)
        self._kept += _shares([(self._total, size, batch)], self._step)
        self._total += size
        while self._total > self._most * self._step:
            self._step *= 2
            self._kept = list(_shares(self._kept, self._step))

    @property
    def batches(self) -> list[Any]:
        """What is kept of each, in order."""
        return [batch for _, _, batch in self._kept]


def thinned(batches: Iterable[Any], most: int) -> list[Any]:
    """What :class:`Thinned` keeps of batches, which are gone through once."""
    kept = Thinned(most)
    for batch in batches:
        kept.add(batch)
    return kept.batches


def first(batches: Iterable[Any], most: int) -> list[Any]:
    """The first batches: as many as it takes to have ``most`` samples, and none behind them is read."""
    kept: list[Any] = []
    for batch in batches:
        kept.append(batch)
        if sum(map(num_samples, kept)) >= most:
            break
    return kept


def checksum(value: Any) -> int:
    """A CRC-32 of the bytes of all tensors in ``value``, in order: to know a batch again."""
    mark = 0
    for tensor in tensors(value):
        mark = zlib.crc32(raw_bytes(tensor), mark)
    return mark


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's numbers in their order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    plain = flat.as_strided(flat.shape, (1,))  # of one number any stride is contiguous, and only 1 is viewed
    return plain.view(torch.uint8).numpy().data


class Once:
    """Batches that can be gone through once; whoever asks again gets a share of them, ``most`` samples.

    Whoever stops within the first ``most`` samples has not gone through them: they are given again.
    """

    def __init__(self, batches: Iterable[Any], most: int) -> None:
        self._batches, self._most = iter(batches), most
        self._kept, self._begun = Thinned(most), False
        self._head: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            yield from self._kept.batches
            return
        yield from self._head
        for batch in self._batches:
            self._kept.add(batch)
            self._remember(batch)
            yield batch
        self._begun, self._head = True, []

    def _remember(self, batch: Any) -> None:
        """Keeps a batch of the head; with the first one behind it the one time has begun."""
        self._begun = self._begun or sum(map(num_samples, self._head)) >= self._most
        self._head = [] if self._begun else [*self._head, batch]


def _shares(batches: Iterable[tuple[int, int, Any]], step: int) -> Iterator[tuple[int, int, Any]]:
    """As many first samples of each batch, behind its place among all and its size, as every ``step``-th would be."""
    for start, size, batch in batches:
        count = -(-(start + size) // step) + (-start // step)
        if count:  # a part that were a view would keep the whole
            part = batch if count >= num_samples(batch) else map_tensors(torch.clone, samples_of(batch, 0, count))
            yield start, size, part


def micro_batches(value: Any, size: int) -> Iterator[Any]:
    """``value`` cut along the batch into pieces of at most ``size`` samples."""
    for start in range(0, num_samples(value), size):
        yield samples_of(value, start, start + size)


def split(value: Any, parts: int) -> list[Any]:
    """``value`` cut along the batch into ``parts`` whose sizes differ by one at most (as ``torch.tensor_split``).

    The batch is the first dimension of the first tensor. Raises QtoolError for a tensor that has another one.
    """
    if parts == 1:
        return [value]
    size = num_samples(value)
    bounds = [size * part // parts for part in range(parts + 1)]
    return [cut(value, low, high, size) for low, high in itertools.pairwise(bounds)]


def cut(value: Any, low: int, high: int, size: int, any_axis: bool = False) -> Any:
    """Samples ``low`` to ``high`` of a batch of ``size``; single numbers, and what is no tensor, as they are.

    With ``any_axis`` the samples of a tensor may be on a later axis, as those of a recurrent layer's state are, and one
    that has no axis of that size is left whole.
    """
    if (low, high) == (0, size):
        return value
    if isinstance(value, list) and len(value) == size and _is_of_samples(value, size):
        return value[low:high]
    if not isinstance(value, Tensor):
        return _rebuilt(value, lambda item: cut(item, low, high, size, any_axis))
    if any_axis:
        axis = next((axis for axis, found in enumerate(value.shape) if found == size), None)
        return value if axis is None else value.narrow(axis, low, high - low)
    if value.dim() and len(value) != size:
        raise QtoolError(
            "batch", f"tensors of {size} samples, to be cut along the batch", f"one of shape {tuple(value.shape)}",
            "give each sample its own, or do not have batches cut",
        )  # fmt: skip
    return value[low:high] if value.dim() else value


def _is_of_samples(value: list[Any], size: int) -> bool:
    """Whether a list as long as the batch has an item for each sample: mappings, or tensors of other lengths."""
    return all(isinstance(item, Mapping) for item in value) or any(t.dim() and len(t) != size for t in tensors(value))


def to_float32(value: Any) -> Any:
    """``value`` with every 16-bit floating tensor as float32: losses and metrics are computed in float32."""
    return map_tensors(lambda t: t.float() if t.dtype in NARROW else t, value)


def no_floats(error: BaseException | None, value: Any) -> str | None:
    """What to do where a layer that computes with floats was given whole numbers; None where that is not the error."""
    text = str(error)
    types = any(word in text for word in ("Byte", "unsigned char", "Long", "(long")) and "float" in text.lower()
    given = types and "indices" not in text and any(not tensor.is_floating_point() for tensor in tensors(value))
    return "return x.float() for its inputs" if given else None


def misnamed(error: Exception, model: Callable[..., Any] | None = None) -> str | None:
    """What to do about a call whose arguments are not the model's, by the error it raised; None for another error."""
    text = str(error)
    if not isinstance(error, TypeError) or "argument" not in text:
        return None
    if "unexpected keyword" in text:
        name = _only_argument(model)
        whole = f"give {{'{name}': {{…}}}} if '{name}' is to be the whole dict; else " if name else ""
        return f"{whole}call the items of a dict what the model calls its arguments, or give (input, target)"
    if "missing" not in text:
        return None
    kept = "; 'labels' in a dict by itself are its target, and stay in ({…},)" if "'label" in text else ""
    return f"give samples ((first, second), target), or dicts by argument{kept}"


def _only_argument(model: Callable[..., Any] | None) -> str | None:
    """The name of the one argument that a model has to be given; None where it is not one, or has no name."""
    taken = inspect.signature(getattr(model, "forward", model)).parameters.values() if model is not None else ()
    needed = [parameter for parameter in taken if parameter.default is parameter.empty]
    return needed[0].name if len(needed) == 1 and needed[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None


def call(model: Callable[..., Any], value: Any) -> Any:
    """``model`` applied to an input: a tuple or list as positional arguments, a dict as keyword arguments."""
    if isinstance(value, Mapping):
        return model(**value)
    if isinstance(value, tuple | list):
        return model(*value)
    return model(value)
