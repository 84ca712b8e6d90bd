"""Generators of random numbers that data and models have for themselves: a loader's, its sampler's, a module's.

Torch, numpy and Python keep a state each for whoever asks for none of their own, and whoever has a generator of their
own draws from that. A pass that is to be repeated, or a run that goes on where it stopped, has to put those back as
well. They are found in what an object holds, by name, as far as that can be seen: in its attributes, in short lists
and dicts of them, in functions that have closed over one; a model's in the attributes of its modules. One that is
global in a file of Python cannot be seen so.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
SHORT = 64
"""The longest list or dict that is looked through: longer ones are samples."""
DEEP = 8
MOST = 10_000
"""Objects that are looked at."""
_HIDES_NONE = (str, bytes, int, float, complex, Tensor, np.ndarray, np.generic, type, ModuleType, random.SystemRandom)


def own_generators(**holders: Any) -> dict[str, Any]:
    """The generators within ``holders``, each once, by the first way to it.

    >>> list(own_generators(train=[{"noise": random.Random(0)}, 3]))
    ['train.0.noise']
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    waiting = [(name, holder, DEEP) for name, holder in reversed(holders.items())]
    while waiting and len(seen) < MOST:
        name, value, depth = waiting.pop()
        if value is None or id(value) in seen or isinstance(value, _HIDES_NONE):
            continue
        seen[id(value)] = value
        if isinstance(value, KINDS):
            found[name] = value
        elif depth:
            waiting += reversed([(f"{name}.{key}", inner, depth - 1) for key, inner in _within(value)])
    return found


def _within(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds, by name."""
    if isinstance(value, dict | list | tuple | set | frozenset):  # other mappings may read files
        if len(value) <= SHORT:
            yield from value.items() if isinstance(value, dict) else enumerate(value)
        return
    if isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        yield from ((name, _content(cell)) for name, cell in zip(names, value.__closure__ or (), strict=True))
        yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    yield from (item for item in getattr(value, "__dict__", {}).items() if item[0] != "_iterator")  # a loader's workers


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put into it yet
        return None


def of_modules(model: nn.Module) -> dict[str, Any]:
    """The generators that are attributes of a model's modules, by name."""
    named = ((f"model.{name}", module) for name, module in model.named_modules())
    return {f"{n}.{key}": value for n, m in named for key, value in vars(m).items() if isinstance(value, KINDS)}


def state_of(generator: Any) -> Any:
    """The state of a generator, as a tree to store."""
    return _as_tensors(own_state(generator))


def own_state(generator: Any) -> Any:
    """The state of a generator, as its library gives it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def put_back(generator: Any, state: Any) -> None:
    """Has a generator in a state that :func:`state_of` or :func:`own_state` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_as_arrays(state))
    else:
        generator.bit_generator.state = _as_arrays(state)


def _as_tensors(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def _as_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, Tensor) else state


def rng_state(own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of every random number generator that training may draw from, as a tree to store.

    ``own`` are those that the data has for itself, by name.
    """
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = (name, torch.tensor(keys), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # to ask one that is not takes its memory
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state | {"own": {name: state_of(generator) for name, generator in (own or {}).items()}}


def set_rng_state(state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Has the generators, those of GPUs and ``own`` ones that are there, in a state that :func:`rng_state` gave."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    kept = state.get("own", {})
    for name, generator in (own or {}).items():
        if name in kept:
            put_back(generator, kept[name])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves every generator as it was before the block."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
        if "cuda" not in before and torch.cuda.is_available():
            torch.cuda.manual_seed_all(torch.initial_seed())  # what its first use would have begun with


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds every generator inside the block, and leaves the caller's generators as they were after it."""
    with generators_kept():
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        yield
