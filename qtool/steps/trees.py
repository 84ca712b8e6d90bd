"""Trees of dicts, lists, numbers, texts and tensors, in files that can hold no code.

A tree is stored as one safetensors file: the tensors under readable names (``model.conv1.weight``), the tree around
them as JSON in the header. Nothing is pickled, so nothing can be run by opening one. What comes back is equal to what
went in: numbers exactly, tensors bit for bit with the same strides (a fused optimizer walks the memory of a parameter
and of its moments side by side, so their layouts have to stay alike), shared tensors shared.

The header also has a checksum of all of it, since safetensors files have none: a bit that flipped on the disk would
otherwise be trained on.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from qtool.errors import QtoolError, kind_of
from qtool.nested import checksum
from qtool.system.files import atomic_path

_SUBCLASSES: dict[str, type[Tensor]] = {}


def register_tensor_class(kind: type[Tensor]) -> None:
    """Lets tensors of a subclass with ``__tensor_flatten__`` be stored (as the plain tensors that make it up)."""
    _SUBCLASSES[f"{kind.__module__}.{kind.__qualname__}"] = kind


def save_tree(path: Path, tree: Any) -> None:
    """Writes ``tree`` to ``path``, atomically. Raises QtoolError when the disk does not take it."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(tree, "", tensors, {}))
    tensors = {name: value.cpu() for name, value in tensors.items()}  # once, to be marked and written
    try:
        with atomic_path(path) as temporary:
            write_tensors(temporary, tensors, {"qtool": structure, "checksum": _mark(structure, tensors)})
    except OSError as error:
        raise QtoolError(
            f"checkpoint '{path}'", "a writable disk with enough space", str(error),
            "make room and run the same command again: it goes on from the last whole checkpoint",
        ) from error  # fmt: skip


def load_tree(path: Path, whole: Path | None = None) -> Any:
    """The tree that :func:`save_tree` wrote, on the CPU. Raises QtoolError when the file is damaged or foreign.

    ``whole`` is what a run can only be started over without, where that is more than the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            structure, tensors = about["qtool"], {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if about.get("checksum", "") not in ("", _mark(structure, tensors)):  # earlier versions wrote none
                raise ValueError("its content is not what its checksum is of")
            return _decode(json.loads(structure), tensors)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise not_whole(path, f"{type(error).__name__}: {error}", whole) from error


def not_whole(path: Path, got: str, whole: Path | None = None) -> QtoolError:
    """The error for a checkpoint's file or folder that is damaged; ``whole`` is that of :func:`load_tree`."""
    what = "it" if whole is None else f"'{whole}'"
    do = f"delete {what} to start over"
    return QtoolError(f"checkpoint '{path}'", "a whole checkpoint written by qtool", got, do)


def packed(tree: Any) -> bytes:
    """``tree`` as the bytes of a file, to be sent to another process."""
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, "", tensors, {})
    data: bytes = save(tensors, metadata={"qtool": json.dumps(structure)})
    return data


def unpacked(data: bytes) -> Any:
    """The tree that :func:`packed` gave."""
    length = int.from_bytes(data[:8], "little")
    structure = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["qtool"])
    return _decode(structure, load(data))


def save_weights(path: Path, model: nn.Module) -> None:
    """Writes a model's weights to a new safetensors file, those that have several names under the first of them."""
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        key = _view(value)
        if not value.numel() or key not in seen:
            tensors[name], seen[key] = _apart(value.contiguous(), seen), name
    write_tensors(path, tensors)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file. Raises OSError where the disk does not take it, as other writers do."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def is_storable(dtype: torch.dtype) -> bool:
    """Whether safetensors files have tensors of that type."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except KeyError:
        return False
    return True


def _mark(structure: str, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a tree: of its structure and of every tensor's name, type, shape and bytes."""
    found = sorted(tensors.items())
    about = str([(name, value.dtype, tuple(value.shape)) for name, value in found])
    return f"{zlib.crc32((structure + about).encode()):08x}{checksum([value for _, value in found]):08x}"


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
    raise TypeError(f"checkpoint entry '{name}': {kind_of(value)} cannot be stored")


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
    key = _view(value)
    if value.numel() and key in seen:
        return {"tensor": seen[key], "order": order}
    tensors[name] = _apart(packed, seen)
    seen[key] = name
    return {"tensor": name, "order": order}


def _view(value: Tensor) -> Any:
    """What two tensors have in common that are one."""
    return (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)


def _apart(packed: Tensor, seen: dict[Any, str]) -> Tensor:
    """``packed``, or a copy where it is a part of a larger storage, or another view of one that was ``seen``.

    Safetensors refuses tensors that overlap, and stores whole ones. The copy is in host memory, since all copies are
    there together.
    """
    storage = packed.untyped_storage()
    whole = storage.nbytes() == packed.numel() * packed.element_size() and storage.data_ptr() not in seen
    if packed.numel():
        seen[storage.data_ptr()] = ""
    return packed if whole else packed.to("cpu", copy=True)


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
