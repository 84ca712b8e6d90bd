"""What a model is fed while it is timed: a batch of the test data, or random values of the right shape.

A symbolic first dimension is the batch. Any other size that the file leaves open has to be given,
since a made-up one would time another model. Random floats are standard normal; integers, which are
mostly token ids and masks, are 0 or 1, which every embedding has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtool.benchmarking.size import load_onnx
from qtool.errors import QtoolError, UsageError
from qtool.runtimes.base import Array, TensorInfo, fits


def random_feeds(
    inputs: Sequence[TensorInfo], batch_size: int, *, shapes: Mapping[str, str] | None = None, seed: int = 0
) -> dict[str, Array]:
    """Random inputs of ``batch_size``. Raises QtoolError where a shape is unknown, UsageError for a bad one given."""
    generator = np.random.default_rng(seed)
    given = {name: parse_shape(name, text) for name, text in (shapes or {}).items()}
    if unknown := sorted(set(given) - {info.name for info in inputs}):
        names = ", ".join(info.name for info in inputs)
        raise UsageError("input shapes", f"inputs {names}", f"'{unknown[0]}'", "name an input of the file")
    return {info.name: _random(generator, info, _shape(info, batch_size, given.get(info.name))) for info in inputs}


def with_scalars(inputs: Sequence[TensorInfo], path: Path) -> tuple[TensorInfo, ...]:
    """``inputs`` of an ONNX file, of which a runtime tells scalars and unknown shapes alike: the file knows scalars."""
    if all(info.shape is not None for info in inputs):
        return tuple(inputs)
    told = {value.name for value in load_onnx(path).graph.input if value.type.tensor_type.HasField("shape")}
    return tuple(replace(info, shape=()) if info.shape is None and info.name in told else info for info in inputs)


def parse_shape(name: str, text: str) -> tuple[int, ...]:
    """``"1x3x224x224"`` as a shape.

    >>> parse_shape("x", "1x3x32")
    (1, 3, 32)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.strip()):
        raise UsageError(f"shape of input '{name}'", "sizes such as 1x3x224x224", repr(text), "correct the shape")
    return tuple(int(part) for part in text.strip().split("x"))


def _shape(info: TensorInfo, batch_size: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is not None:
        if _fixed_batch(info):
            return _checked(info, given)
        if given[0] not in (1, batch_size):
            raise UsageError(
                f"shape of input '{info.name}'", f"1 or {batch_size} first, the batch", str(given[0]),
                f"ask for the batch with --batch-sizes {given[0]}",
            )  # fmt: skip
        return _checked(info, (batch_size, *given[1:]))
    shape = info.shape
    if shape is None or any(not isinstance(d, int) for d in shape[1:]) or 0 in shape:
        raise QtoolError(
            f"input '{info.name}'", "sizes known beside the batch", str(info),
            f"give it as {info.name}=1x… with --shapes, or pass data",
        )  # fmt: skip
    return tuple(d if isinstance(d, int) else batch_size for d in shape)


def _fixed_batch(info: TensorInfo) -> bool:
    return isinstance((info.shape or (None,))[0], int)


def fixed_batch_size(inputs: Sequence[TensorInfo]) -> int | None:
    """The batch size that the file is fixed to, or None where it is open."""
    sizes = [info.shape[0] for info in inputs if info.shape and isinstance(info.shape[0], int)]
    return sizes[0] if sizes else None


def _checked(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not fits(shape, info.shape):
        raise UsageError(f"shape of input '{info.name}'", str(info), "x".join(map(str, shape)), "correct the shape")
    return shape


def _random(generator: np.random.Generator, info: TensorInfo, shape: tuple[int, ...]) -> Array:
    if info.dtype.startswith("float"):
        return generator.standard_normal(shape).astype(info.dtype)
    return generator.integers(0, 2, shape).astype(info.dtype)


def to_feeds(value: Any, inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """A batch (tensor, array, tuple of them, or dict by name) as feeds, cast to float formats the file wants.

    Raises QtoolError where the number or names of the inputs differ.
    """
    if isinstance(value, Mapping):
        named = dict(value)
    else:
        parts = list(value) if isinstance(value, tuple | list) else [value]
        if len(parts) != len(inputs):
            names = ", ".join(info.name for info in inputs)
            raise QtoolError("data", f"{len(inputs)} inputs ({names})", str(len(parts)), "use data made for this model")
        named = {info.name: part for info, part in zip(inputs, parts, strict=True)}
    return {info.name: _cast(named[info.name], info) for info in inputs if info.name in named}


def _cast(value: Any, info: TensorInfo) -> Array:
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    floats = array.dtype.kind == "f" and info.dtype in ("float16", "float32", "float64")
    integers = array.dtype.kind in "iu" and info.dtype in ("int32", "int64")
    return np.ascontiguousarray(array.astype(info.dtype) if floats or integers else array)


def resize_batch(feeds: Mapping[str, Array], batch_size: int) -> dict[str, Array]:
    """Feeds of exactly ``batch_size`` samples: the last one repeated, or those beyond left out."""
    return {name: value[np.minimum(np.arange(batch_size), len(value) - 1)] for name, value in feeds.items()}
