"""Checkpoints: everything that an exact resume needs, in one file that can hold no code (``qtool.steps.trees``).

The file is written under a temporary name and renamed, and older ones are removed after that: a kill at any moment
leaves a whole checkpoint. Random number generators (Python, NumPy, torch, CUDA) are part of the state, see
``qtool.system.generators``.

:class:`Files` is how a run keeps its model, its optimizer and the rest in such files. A model that is
sharded over several processes has another way (``qtool.training.sharded_files``).
"""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.models.grown import grow
from qtool.nested import checksum
from qtool.steps.trees import load_tree, packed, save_tree, unpacked
from qtool.system import processes
from qtool.system.generators import of_modules, rng_state, set_rng_state

_NAME = re.compile(r"step-(\d+)(\.safetensors)?")
BEST = "best"


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
    grow(model, state)
    model.load_state_dict(state, strict=False)


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
    grow(model, state)
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


def all_rng_states(own: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The generators' states of all processes, in order of rank."""
    return [unpacked(state) for state in processes.gather(packed(rng_state(own)))]


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
