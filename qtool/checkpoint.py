"""Checkpoints: everything that an exact resume needs, in one file that can hold no code.

A checkpoint is a tree of dicts, lists, numbers, texts and tensors. It is stored as one safetensors file:
the tensors under readable names (``model.conv1.weight``), the tree around them as JSON in the header.
Nothing is pickled, so nothing can be run by opening one. What comes back is equal to what went in:
numbers exactly, tensors bit for bit with the same strides (a fused optimizer walks the memory of a
parameter and of its moments side by side, so their layouts have to stay alike), shared tensors shared.

The file is written under a temporary name and renamed, and older ones are removed after that: a kill at
any moment leaves a whole checkpoint. Random number generators (Python, NumPy, torch, CUDA) are part of
the state, see :func:`rng_state`.

Left out on purpose: sharded checkpoints, which are several files (see ``qtool.training``).
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from qtool.artifacts import atomic_path
from qtool.errors import QtoolError

_NAME = re.compile(r"step-(\d+)\.safetensors")
_SUBCLASSES: dict[str, type[Tensor]] = {}


def register_tensor_class(kind: type[Tensor]) -> None:
    """Lets tensors of a subclass with ``__tensor_flatten__`` be stored (as the plain tensors that make it up)."""
    _SUBCLASSES[f"{kind.__module__}.{kind.__qualname__}"] = kind


def save_tree(path: Path, tree: Any) -> None:
    """Writes ``tree`` to ``path``, atomically. Raises QtoolError when the disk does not take it."""
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, "", tensors, {})
    try:
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"qtool": json.dumps(structure)})
    except (OSError, SafetensorError) as error:
        raise QtoolError(
            f"checkpoint '{path}'", "a writable disk with enough space", str(error),
            "make room and run the same command again: it goes on from the last whole checkpoint",
        ) from error  # fmt: skip


def load_tree(path: Path) -> Any:
    """The tree that :func:`save_tree` wrote, on the CPU. Raises QtoolError when the file is damaged or foreign."""
    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads((file.metadata() or {})["qtool"])
            return _decode(structure, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise QtoolError(
            f"checkpoint '{path}'", "a whole checkpoint written by qtool", f"{type(error).__name__}: {error}",
            "delete it to start over",
        ) from error  # fmt: skip


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in ``folder``, or None."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def commit(folder: Path, step: int, tree: Any) -> Path:
    """Stores ``tree`` as the checkpoint of ``step`` and, once it is whole, removes the others."""
    path = folder / f"step-{step:08d}.safetensors"
    save_tree(path, tree)
    for other in folder.glob("step-*"):
        if other != path and _NAME.fullmatch(other.name):
            other.unlink()
    return path


def _encode(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """``value`` as JSON, its tensors put into ``tensors``; every container is tagged with its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, name, tensors, seen)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = [[_key(k), _encode(v, f"{name}.{k}".strip("."), tensors, seen)] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, tuple | list):
        items = [_encode(v, f"{name}.{i}", tensors, seen) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(f"checkpoint entry '{name}': a {type(value).__name__} cannot be stored")


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"checkpoint key {key!r}: only text and whole numbers can be stored")
    return key


def _encode_tensor(value: Tensor, name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in _SUBCLASSES:
        parts, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {part: _encode_tensor(getattr(value, part), f"{name}.{part}", tensors, seen) for part in parts}
        about = _encode(context, name, tensors, seen)
        return {"subclass": [kind, inner, about, list(value.shape), list(value.stride())]}
    value = value.detach()
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    packed = value.permute(order)
    if not packed.is_contiguous():
        order, packed = list(range(value.dim())), value.contiguous()
    key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
    if value.numel() and key in seen:
        return {"tensor": seen[key], "order": order}
    # A part of a larger storage is copied: safetensors refuses tensors that overlap, and stores whole ones.
    whole = packed.untyped_storage().nbytes() == packed.numel() * packed.element_size()
    tensors[name] = packed if whole else packed.clone()
    seen[key] = name
    return {"tensor": name, "order": order}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _decode(item, tensors) for key, item in value["dict"]}
    if "list" in value:
        return [_decode(item, tensors) for item in value["list"]]
    if "tuple" in value:
        return tuple(_decode(item, tensors) for item in value["tuple"])
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "subclass" in value:
        kind, inner, context, shape, stride = value["subclass"]
        parts = {name: _decode(item, tensors) for name, item in inner.items()}
        return _SUBCLASSES[kind].__tensor_unflatten__(parts, _decode(context, tensors), shape, stride)  # type: ignore[attr-defined]
    order = value["order"]
    return tensors[value["tensor"]].permute([order.index(d) for d in range(len(order))])


def learned(model: nn.Module) -> dict[str, Any]:
    """What training changes of a model: its state without frozen parameters, whose values it began with."""
    kept = model.state_dict(keep_vars=True)
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in kept.items()
        if not isinstance(value, nn.Parameter) or value.requires_grad
    }


def rng_state() -> dict[str, Any]:
    """The state of every random number generator that training may draw from, as a tree to store."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.tensor(keys), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back into a state that :func:`rng_state` gave."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds every generator inside the block, and leaves the caller's generators as they were after it."""
    before = rng_state()
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            import numpy

            numpy.random.seed(seed % 2**32)
        yield
    finally:
        set_rng_state(before)
