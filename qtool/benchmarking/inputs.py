"""What a model is fed while it is timed: a batch of the test data, or random values of the right shape.

A symbolic first dimension is the batch, and so is a dimension of the same symbol in an input that begins with another
(a recurrent state of layers × batch × width); what has neither is fed whole. Any other size that the file leaves open
has to be given, since a made-up one would time another model; it holds for all inputs that have it under the same
symbol (token ids and their mask). Random floats are standard normal; integers, which are
mostly token ids and masks, are 0 or 1, which every embedding has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtool.benchmarking.size import load_onnx
from qtool.errors import QtoolError, UsageError
from qtool.nested import leaves, named
from qtool.runtimes.base import Array, TensorInfo, fits, to_array

Shape = tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Layout:
    """Where a file's inputs count samples: the axis of each input that does, and how many where that is fixed.

    ``symbols`` are what the file calls their number.
    """

    axes: Mapping[str, int]
    size: int | None
    symbols: frozenset[str] = frozenset()

    @classmethod
    def of(cls, inputs: Sequence[TensorInfo]) -> Layout:
        """That of a file. One without an open first dimension is fixed to the first of its first dimensions."""
        first = {info.name: None if info.shape is None else info.shape[0] for info in inputs if info.shape != ()}
        open_axes = {name for name, size in first.items() if not isinstance(size, int)}
        if not open_axes:
            size = next((size for size in first.values() if isinstance(size, int) and size), None)
            return cls({name: 0 for name, own in first.items() if own == size}, size)
        symbols = {first[name] for name in open_axes} - {None}
        axes = {}
        for info in inputs:
            named = [axis for axis, size in enumerate(info.shape or ()) if size in symbols]
            if info.name in open_axes or named:
                axes[info.name] = 0 if info.name in open_axes else named[0]
        return cls(axes, None, frozenset(filter(None, map(str, symbols))))

    def axis(self, output: TensorInfo | None, shape: Sequence[int], samples: int) -> int | None:
        """The axis of an output of ``shape`` that counts the ``samples`` it is of; None where none does.

        It is one that the file leaves open, first of all under the inputs' symbol (logits of CTC are time × batch ×
        classes), or one of the fixed size; a multiple where each sample has several rows. A size that is not the
        file's own word for it is taken for open.
        """
        told = output.shape if output and output.shape and len(output.shape) == len(shape) else (None,) * len(shape)
        free = [
            axis for axis, (own, size) in enumerate(zip(told, shape, strict=True))
            if own != size or size == 1 or (self.size and size % self.size == 0)
        ]  # fmt: skip
        likely = sorted(free, key=lambda axis: (told[axis] not in self.symbols, shape[axis] != samples))
        return next((axis for axis in likely if self.axes and shape[axis] % samples == 0), None)

    def count(self, feeds: Mapping[str, Array]) -> int:
        """How many samples there are; 1 where nothing counts them. Raises QtoolError where inputs differ in that."""
        read = {name: axis for name, axis in self.axes.items() if name in feeds}
        if flat := next((name for name, axis in read.items() if feeds[name].ndim <= axis), None):
            got = f"'{flat}' of shape {list(feeds[flat].shape)}"
            do = "give batches, as data made for this model has them"
            raise QtoolError("data", f"an axis {read[flat]} that counts samples", got, do)
        counts = {name: feeds[name].shape[axis] for name, axis in read.items()}
        if len(set(counts.values())) > 1:
            got = ", ".join(f"{name} with {count}" for name, count in counts.items())
            raise QtoolError("data", "inputs of as many samples each", got, "use data made for this model")
        return next(iter(counts.values()), 1)

    def taken(self, feeds: Mapping[str, Array], samples: Sequence[int] | range) -> dict[str, Array]:
        """The feeds of these samples; those beyond the last one repeat it."""
        indices = np.minimum(np.asarray(samples, dtype=np.int64), self.count(feeds) - 1)
        return {
            name: value.take(indices, axis=self.axes[name]) if name in self.axes else value
            for name, value in feeds.items()
        }


def random_feeds(
    inputs: Sequence[TensorInfo], batch_size: int, *, shapes: Mapping[str, str] | None = None, seed: int = 0
) -> dict[str, Array]:
    """Random inputs of ``batch_size``. Raises QtoolError where a shape is unknown, UsageError for a bad one given."""
    generator, layout = np.random.default_rng(seed), Layout.of(inputs)
    given = {name: parse_shape(name, text) for name, text in (shapes or {}).items()}
    return {
        info.name: _random(generator, info, _shape(info, layout, batch_size, given.get(info.name)))
        for info in _told(inputs, given, layout)
    }


def _told(inputs: Sequence[TensorInfo], given: Mapping[str, tuple[int, ...]], layout: Layout) -> Iterator[TensorInfo]:
    """The inputs, with the sizes that given shapes tell of symbols beside the batch in those whose shape is not."""
    sizes: dict[str | int | None, int] = {}
    for info in inputs:
        sizes |= zip(info.shape or (), given.get(info.name, ()), strict=False)
    told: dict[Any, Any] = {k: v for k, v in sizes.items() if isinstance(k, str) and k not in layout.symbols}
    for info in inputs:
        shape = info.shape and tuple(told.get(own, own) for own in info.shape)
        yield info if info.name in given else replace(info, shape=shape)


def require_known(shapes: Mapping[str, str], files: Iterable[Sequence[TensorInfo]]) -> None:
    """Raises UsageError where a shape is given for an input that none of the files has."""
    names = dict.fromkeys(info.name for inputs in files for info in inputs)
    if unknown := sorted(set(shapes) - set(names)):
        raise UsageError("input shapes", f"inputs {', '.join(names)}", f"'{unknown[0]}'", "name an input of a file")


def as_written(inputs: Sequence[TensorInfo], path: Path) -> tuple[TensorInfo, ...]:
    """``inputs`` of an ONNX file with what a runtime does not tell of them and the file does; of others as they are.

    ONNX Runtime tells scalars and unknown shapes alike, and OpenVINO no symbol of an open size: by these a state that
    begins with its layers has its batch.
    """
    if path.suffix != ".onnx" or all(info.shape is not None and None not in info.shape for info in inputs):
        return tuple(inputs)
    values = {value.name: value.type.tensor_type for value in load_onnx(path).graph.input}
    written = {
        name: tuple(dim.dim_param or None for dim in kind.shape.dim)
        for name, kind in values.items()
        if kind.HasField("shape")
    }
    return tuple(replace(info, shape=_named(info.shape, written.get(info.name))) for info in inputs)


def _named(shape: Shape, symbols: tuple[str | None, ...] | None) -> Shape:
    """A runtime's shape with the file's symbols of what is open; that of a scalar where the file says so."""
    if shape is None:
        return () if symbols == () else None
    if symbols is None or len(symbols) != len(shape):
        return shape
    return tuple(name if size is None else size for size, name in zip(shape, symbols, strict=True))


def parse_shape(name: str, text: str) -> tuple[int, ...]:
    """``"1x3x224x224"`` as a shape.

    >>> parse_shape("x", "1x3x32")
    (1, 3, 32)
    """
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text.strip()):
        do = "give each input a --shapes of its own" if "=" in text else "correct the shape"
        raise UsageError(f"shape of input '{name}'", "sizes such as 1x3x224x224", repr(text), do)
    return tuple(int(part) for part in text.strip().split("x"))


def _shape(info: TensorInfo, layout: Layout, batch_size: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    axis = layout.axes.get(info.name) if layout.size is None else None
    if given is not None:
        if axis is None or len(given) <= axis:
            return _checked(info, given)
        if given[axis] not in (1, batch_size):
            where = "first, the batch" if axis == 0 else f"at axis {axis}, the batch"
            raise UsageError(
                f"shape of input '{info.name}'", f"{' or '.join(map(str, sorted({1, batch_size})))} {where}",
                str(given[axis]),
                f"ask for the batch with --batch-sizes {given[axis]}",
            )  # fmt: skip
        return _checked(info, (*given[:axis], batch_size, *given[axis + 1 :]))
    shape = info.shape and tuple(batch_size if place == axis else size for place, size in enumerate(info.shape))
    if shape is None or any(not isinstance(size, int) for size in shape):
        raise QtoolError(
            f"input '{info.name}'", "sizes known beside the batch", str(info),
            f"give it as {info.name}=1x… with --shapes, or pass data",
        )  # fmt: skip
    return tuple(int(str(size)) for size in shape)


def _checked(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not fits(shape, info.shape):
        raise UsageError(f"shape of input '{info.name}'", str(info), "x".join(map(str, shape)), "correct the shape")
    return shape


def _random(generator: np.random.Generator, info: TensorInfo, shape: tuple[int, ...]) -> Array:
    try:
        if info.dtype.startswith("float"):
            return generator.standard_normal(shape).astype(info.dtype)
        return generator.integers(0, 2, shape).astype(info.dtype)
    except (MemoryError, ValueError) as error:  # the latter beyond what numpy can count
        got = f"{info.dtype}[{', '.join(map(str, shape))}]"
        do = "give smaller sizes with --shapes and --batch-sizes where the file leaves them open"
        raise QtoolError(f"input '{info.name}'", "a size that this machine has the memory for", got, do) from error


def to_feeds(value: Any, inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """A batch (tensor, array, tuple of them, dict by name, nested too) as feeds, cast to floats that the file wants.

    Raises QtoolError where the number or names of the inputs differ.
    """
    if isinstance(value, Mapping):
        given = named(value)
    else:
        parts = [part for _, part in leaves(value)]
        if len(parts) != len(inputs):
            names = ", ".join(info.name for info in inputs)
            raise QtoolError("data", f"{len(inputs)} inputs ({names})", str(len(parts)), "use data made for this model")
        given = {info.name: part for info, part in zip(inputs, parts, strict=True)}
    return {info.name: _cast(given[info.name], info) for info in inputs if info.name in given}


def _cast(value: Any, info: TensorInfo) -> Array:
    array = to_array(value)
    floats = array.dtype.kind == "f" and info.dtype in ("float16", "float32", "float64")
    integers = array.dtype.kind in "iu" and info.dtype in ("int32", "int64")
    return array.astype(info.dtype) if floats or integers else array


def sized_feeds(value: Any, inputs: Sequence[TensorInfo], batch_size: int) -> dict[str, Array]:
    """A batch as feeds of exactly ``batch_size`` samples: the last one repeated, or those beyond left out."""
    return Layout.of(inputs).taken(to_feeds(value, inputs), range(batch_size))
