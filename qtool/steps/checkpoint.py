"""Checkpoints: everything that an exact resume needs, in one file that can hold no code.

A checkpoint is a tree of dicts, lists, numbers, texts and tensors. It is stored as one safetensors file:
the tensors under readable names (``model.conv1.weight``), the tree around them as JSON in the header.
Nothing is pickled, so nothing can be run by opening one. What comes back is equal to what went in:
numbers exactly, tensors bit for bit with the same strides (a fused optimizer walks the memory of a
parameter and of its moments side by side, so their layouts have to stay alike), shared tensors shared.

The header also has a checksum of all of it, since safetensors files have none: a bit that flipped on the disk would
otherwise be trained on.

The file is written under a temporary name and renamed, and older ones are removed after that: a kill at
any moment leaves a whole checkpoint. Random number generators (Python, NumPy, torch, CUDA) are part of
the state, see :func:`rng_state`.

:class:`Files` is how a run keeps its model, its optimizer and the rest in such files. A model that is
sharded over several processes has another way (``qtool.training.sharded_files``).
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import re
import shutil
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from qtool.artifacts import atomic_path
from qtool.errors import QtoolError, kind_of
from qtool.nested import checksum
from qtool.system import processes
from qtool.system.generators import of_modules, state_of
from qtool.system.generators import put_back as put_back_generator

_NAME = re.compile(r"step-(\d+)(\.safetensors)?")
BEST = "best"
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


def _mark(structure: str, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a tree: of its structure and of every tensor's name, type, shape and bytes."""
    found = sorted(tensors.items())
    about = str([(name, value.dtype, tuple(value.shape)) for name, value in found])
    return f"{zlib.crc32((structure + about).encode()):08x}{checksum([value for _, value in found]):08x}"


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


def _packed(tree: Any) -> bytes:
    """``tree`` as the bytes of a file, to be sent to another process."""
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, "", tensors, {})
    data: bytes = save(tensors, metadata={"qtool": json.dumps(structure)})
    return data


def _unpacked(data: bytes) -> Any:
    """The tree that :func:`_packed` gave."""
    length = int.from_bytes(data[:8], "little")
    structure = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["qtool"])
    return _decode(structure, load(data))


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in ``folder``, or None."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def last_good(saved: Path | None) -> str:
    """How an error ends that stops a run: where it can go on from."""
    return f"last good checkpoint: '{saved}'" if saved else "no checkpoint was written before it"


def commit(folder: Path, step: int, tree: Any) -> Path:
    """Stores ``tree`` as the checkpoint of ``step`` and, once it is whole, removes the others."""
    path = folder / f"step-{step:08d}.safetensors"
    save_tree(path, tree)
    clear(folder, keep=path)
    return path


def clear(folder: Path, *, keep: Path | None = None) -> None:
    """Removes the checkpoints in ``folder``; without one to ``keep``, the best weights too."""
    for path in folder.glob("*"):
        if path != keep and (_NAME.fullmatch(path.name) or (keep is None and path.stem == BEST)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Files:
    """One file for each checkpoint, written by the first process: all of them hold the same model and optimizer."""

    def commit(self, folder: Path, step: int, rest: Mapping[str, Any], model: nn.Module, optimizer: Any) -> Path:
        """Stores a model, its optimizer and the rest of a run's state as the checkpoint of ``step``."""
        if processes.rank() == 0:
            commit(folder, step, {**rest, "model": learned(model), "optimizer": optimizer.state_dict()})
        return folder / f"step-{step:08d}.safetensors"

    def read(self, path: Path) -> dict[str, Any]:
        """What was stored; model and optimizer are for :meth:`restore`. Raises QtoolError where it is damaged."""
        if path.is_dir():
            raise QtoolError(
                f"checkpoint '{path}'", "one of a whole model", "one of a sharded model",
                "pass --strategy fsdp, or start over with --no-resume",
            )  # fmt: skip
        tree: dict[str, Any] = load_tree(path)
        return tree

    def restore(self, tree: Mapping[str, Any], model: nn.Module, optimizer: Any) -> None:
        """Puts what :meth:`read` gave into a model and its optimizer."""
        take(model, tree["model"])
        optimizer.load_state_dict(tree["optimizer"])

    def keep_best(self, folder: Path, model: nn.Module) -> None:
        """Stores a model's weights as the best so far."""
        if processes.rank() == 0:
            save_tree(folder / f"{BEST}.safetensors", learned(model))

    def take_best(self, folder: Path, model: nn.Module) -> None:
        """Puts the best weights so far into a model."""
        processes.wait()
        take(model, load_tree(folder / f"{BEST}.safetensors", folder))


def take(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what :func:`learned` gave; frozen parameters are not in it."""
    _reshape(model, state)
    model.load_state_dict(state, strict=False)


def _reshape(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives buffers the shapes that they have in a state: some grow, or come into being, while a model trains."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in state.items():
        place, _, last = name.rpartition(".")
        buffers = modules[place]._buffers if place in modules else {}
        if last in buffers:
            own = buffers[last]
            if own is None:
                buffers[last] = value.to(next((p.device for p in model.parameters()), value.device), copy=True)
            elif own.shape != value.shape:
                buffers[last] = own.new_empty(value.shape)


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


def save_weights(path: Path, model: nn.Module) -> None:
    """Writes a model's weights to a new safetensors file, those that have several names under the first of them."""
    tensors: dict[str, Tensor] = {}
    seen: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        key = _view(value)
        if not value.numel() or key not in seen:
            tensors[name], seen[key] = _apart(value.contiguous(), seen), name
    write_tensors(path, tensors)


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


def copied(model: nn.Module) -> dict[str, Any]:
    """What training changes of a model, copied into host memory; of sharded tensors this process's parts."""
    return {
        name: processes.local(value).to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in learned(model).items()
    }


@torch.no_grad()
def put_back(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Has a model as :func:`copied` found it."""
    _reshape(model, state)
    for name, own in learned(model).items():
        if isinstance(own, Tensor):
            _write(processes.local(own), state[name])
        else:
            model.load_state_dict({name: state[name]}, strict=False)


class Unstored:
    """The buffers that a model's state leaves out, and which of them training has moved since this was made.

    Most are constants (masks, frequencies), which a model that is made again has. Those that move, a resume gives back,
    and so does who repeats a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.began = {name: checksum(buffer) for name, buffer in self._all().items()}
        self.moving: set[str] = set()
        self.marks: dict[str, tuple[Callable[[], Any], int]] | None = None

    def _all(self) -> dict[str, Tensor]:
        return {
            f"{place}.{name}".strip("."): buffer
            for place, module in self.model.named_modules()
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set
            and buffer is not None and buffer.layout is torch.strided and not buffer.is_meta
        }  # fmt: skip

    def moved(self) -> dict[str, Tensor]:
        """Copies of those that are not what they were."""
        return {name: b.clone() for name, b in self._all().items() if checksum(b) != self.began.get(name)}

    def copies(self, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copies in host memory of those ``wanted``, or of all of them."""
        there = self._all().items()
        return {name: buffer.to("cpu", copy=True) for name, buffer in there if wanted is None or name in wanted}

    def kept(self) -> dict[str, Tensor]:
        """Copies in host memory of those that the next step may move: at first of all, then of those that one has."""
        there, marks = self._all(), self.marks
        if marks is not None:
            self.moving |= {name for name, buffer in there.items() if not _is_marked(buffer, marks.get(name))}
        self.marks = {name: (weakref.ref(buffer), _version(buffer)) for name, buffer in there.items()}
        return self.copies(None if marks is None else self.moving)

    @torch.no_grad()
    def put_back(self, moved: Mapping[str, Tensor]) -> None:
        """Has buffers as any of the others gave them, also such as have other shapes or types by now."""
        there = self._all()
        for name, value in moved.items():
            place, _, last = name.rpartition(".")
            own = there.get(name)
            if own is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                _write(own, value)  # what is written counts as moved
            else:
                first = next(itertools.chain(self.model.parameters(), self.model.buffers()), value)
                self.model.get_submodule(place)._buffers[last] = value.to(first.device, copy=True)


def _write(own: Tensor, value: Tensor) -> None:
    """Has a tensor hold what ``value`` does, if it does not: one that is a view of less memory cannot be written."""
    if not torch.equal(own, value := value.to(own.device)):
        own.copy_(value)


def _version(buffer: Tensor) -> int:
    """How often a tensor was written; one that was made in inference mode cannot be."""
    return 0 if buffer.is_inference() else buffer._version


def _is_marked(buffer: Tensor, mark: Any) -> bool:
    """Whether a buffer is the one that was marked, and has not been written since."""
    return mark is not None and mark[0]() is buffer and mark[1] == _version(buffer)


def statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that a model's state has: not masks, nor frozen weights in 4 bits."""
    own = {id(value) for value in model.state_dict(keep_vars=True).values()}
    return [buffer for buffer in model.buffers() if id(buffer) in own]


def rng_state(own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of every random number generator that training may draw from, as a tree to store.

    ``own`` are those that the data has for itself (``qtool.system.generators``).
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.tensor(keys), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # to ask one that is not takes its memory
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state | {"own": {name: state_of(generator) for name, generator in (own or {}).items()}}


def all_rng_states(own: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The generators' states of all processes, in order of rank."""
    return [_unpacked(state) for state in processes.gather(_packed(rng_state(own)))]


def set_rng_state(state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Has the generators, those of GPUs and ``own`` ones that are there, in a state that :func:`rng_state` gave."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    kept = state.get("own", {})
    for name, generator in (own or {}).items():
        if name in kept:
            put_back_generator(generator, kept[name])


def restorer(model: nn.Module, buffers: Iterable[Tensor], own: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """What puts the generators, the model's and ``own`` ones too, and those ``buffers`` back to where they are now."""
    own = of_modules(model) | dict(own or {})
    generators, wanted = rng_state(own), {id(buffer) for buffer in buffers if buffer.layout is torch.strided}
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if id(buffer) in wanted
    ]
    absent = [(module, name) for module in model.modules() for name, b in module._buffers.items() if b is None]

    @torch.no_grad()
    def restore() -> None:
        set_rng_state(generators, own)
        for module, name in absent:
            module._buffers[name] = None
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer  # it may have been replaced instead of written
            _write(buffer, value)

    return restore


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
        if "numpy" in sys.modules:
            import numpy

            numpy.random.seed(seed % 2**32)
        yield
