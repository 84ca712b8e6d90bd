"""Checkpoints of a sharded model: every process writes its own part, and any number of processes reads them.

A checkpoint is a folder::

    step-00000010/
      main.safetensors                what all processes share: the place in the data, generators, scaler, buffers
      shard-00001-….safetensors       one process's part of every weight and of every state shaped like a weight
      sums.safetensors                the sha256 of every shard
      own-00000-of-00002.safetensors  with 8-bit optimizers: that process's states, quantized in blocks of its part

The shards are written and read by ``torch.distributed.checkpoint`` with its safetensors storage: each file's
header says where its parts lie in the whole tensor, and a process reads what overlaps its own. Nothing is
pickled; DCP's own format is, and is not used here.

The folder is written under a hidden name. When all processes have written and flushed, the first one renames it
and then removes older ones: a kill at any moment leaves a whole checkpoint. Processes on several machines need a
folder that all of them see.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from qtool.errors import QtoolError, QtoolWarning
from qtool.steps.checkpoint import BEST, Files, clear, learned, take
from qtool.steps.trees import load_tree, not_whole, save_tree
from qtool.system import processes
from qtool.system.files import sha256_of
from qtool.training.block_states import cut_anew
from qtool.training.local_shards import LocalShards, like

MAIN, SUMS = "main.safetensors", "sums.safetensors"


class ShardedFiles(Files):
    """A folder for each checkpoint, into which every process writes."""

    def commit(self, folder: Path, step: int, rest: Mapping[str, Any], model: nn.Module, optimizer: Any) -> Path:
        """Stores a sharded model, its optimizer and the rest of a run's state as the checkpoint of ``step``."""
        assert isinstance(optimizer, LocalShards)
        path = folder / f"step-{step:08d}"
        sharded: dict[str, DTensor] = {}
        weights = _taken_out(_learned(model), "model", sharded)
        states = {"world": processes.size()}
        with _committed(path) as new:
            if optimizer.own_states:
                save_tree(new / _own(processes.rank(), processes.size()), optimizer.state_dict())
            else:
                states |= {"state": _taken_out(optimizer.state_dict(), "optimizer", sharded)}
            _save(new, sharded)
            if processes.rank() == 0:
                save_tree(new / MAIN, {**rest, "model": weights, "optimizer": states})
        if processes.rank() == 0:
            clear(folder, keep=path)
        return path

    def read(self, path: Path) -> dict[str, Any]:
        """What all processes share; the parts are read by :meth:`restore`."""
        if not path.is_dir():
            raise QtoolError(
                f"checkpoint '{path}'", "one of a sharded model", "one of a whole model",
                "pass --strategy ddp, or start over with --no-resume",
            )  # fmt: skip
        return {**load_tree(path / MAIN, path), "path": path}

    def restore(self, tree: Mapping[str, Any], model: nn.Module, optimizer: Any) -> None:
        """Reads this process's part of model and optimizer states, whatever number of processes wrote them."""
        assert isinstance(optimizer, LocalShards)
        path, world = tree["path"], tree["optimizer"]["world"]
        own = _learned(model)
        wanted = {f"model.{name}": value for name, value in own.items() if isinstance(value, DTensor)}
        states = None
        if not optimizer.own_states:
            states = _put_in(tree["optimizer"]["state"], optimizer.parameters, wanted)
        _load(path, wanted, path)
        take(model, {name: wanted.get(f"model.{name}", tree["model"][name]) for name in own})
        if states is not None:
            optimizer.load_state_dict(states)
        elif world == processes.size():
            optimizer.load_state_dict(load_tree(path / _own(processes.rank(), world), path))
        else:
            if processes.rank() == 0:
                warnings.warn(
                    f"a checkpoint of --devices {world} is read by {processes.size()}: 8-bit optimizer states are "
                    "quantized again where their blocks straddle the new shards, so the resume is not exact",
                    QtoolWarning,
                    stacklevel=2,
                )
            trees = [load_tree(path / _own(rank, world), path) for rank in range(world)]
            optimizer.load_state_dict(cut_anew(trees, optimizer.parameters))

    def keep_best(self, folder: Path, model: nn.Module) -> None:
        """Stores a model's weights as the best so far."""
        sharded: dict[str, DTensor] = {}
        rest = _taken_out(_learned(model), "model", sharded)
        with _committed(folder / BEST) as new:
            _save(new, sharded)
            if processes.rank() == 0:
                save_tree(new / MAIN, rest)

    def take_best(self, folder: Path, model: nn.Module) -> None:
        """Puts the best weights so far into a model."""
        rest, own = load_tree(folder / BEST / MAIN, folder), _learned(model)
        wanted = {f"model.{name}": value for name, value in own.items() if isinstance(value, DTensor)}
        _load(folder / BEST, wanted, folder)
        take(model, {name: wanted.get(f"model.{name}", rest[name]) for name in own})


def _learned(model: nn.Module) -> dict[str, Any]:
    """What training changes of a model, each tensor under the first of its names: safetensors stores none twice."""
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        first.setdefault(id(value), name)
    names = set(first.values())
    return {name: value for name, value in learned(model).items() if name in names}


def _own(rank: int, world: int) -> str:
    return f"own-{rank:05d}-of-{world:05d}.safetensors"


@contextmanager
def _committed(path: Path) -> Iterator[Path]:
    """A folder that all processes write into, which takes its name when all have."""
    new = path.with_name(f".{path.name}-pending")
    if processes.rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    processes.wait()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    processes.wait()
    if processes.rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        new.replace(path)
        _flush(path.parent)
    processes.wait()


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save(folder: Path, sharded: Mapping[str, DTensor]) -> None:
    try:
        save(dict(sharded), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        own = {path.name: sha256_of(path) for path in folder.glob(f"shard-{processes.rank() + 1:05d}-*")}
    except (OSError, CheckpointException) as error:
        raise QtoolError(
            f"checkpoint '{folder}'", "a writable disk with enough space", _first_line(error),
            "make room and run the same command again: it goes on from the last whole checkpoint",
        ) from error  # fmt: skip
    sums = {name: value for part in processes.gather(own) for name, value in part.items()}
    if processes.rank() == 0:
        save_tree(folder / SUMS, sums)


def _load(folder: Path, wanted: dict[str, Any], whole: Path) -> None:
    """Fills the sharded tensors in ``wanted`` in place; ``whole`` is that of :func:`load_tree`."""
    _require_whole(folder, whole)
    try:
        load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))
    except (OSError, CheckpointException) as error:
        raise not_whole(folder, _first_line(error), whole) from error


def _require_whole(folder: Path, whole: Path) -> None:
    """Raises QtoolError in every process where a shard is not as it was written; each reads its share of them."""
    if not (folder / SUMS).exists():  # earlier versions wrote none
        return
    sums = load_tree(folder / SUMS, whole)
    shares = sorted(sums)[processes.rank() :: processes.size()]
    bad = [name for name in shares if not (path := folder / name).is_file() or sha256_of(path) != sums[name]]
    if found := sorted(name for part in processes.gather(bad) for name in part):
        raise not_whole(folder, f"'{found[0]}' missing, or with another content than was written", whole)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def _taken_out(tree: Any, name: str, sharded: dict[str, DTensor]) -> Any:
    """``tree`` with its sharded tensors put into ``sharded``, and their dtypes in their places."""
    if isinstance(tree, DTensor):
        sharded[name] = tree
        return tree.dtype
    if isinstance(tree, Mapping):
        return {key: _taken_out(value, f"{name}.{key}", sharded) for key, value in tree.items()}
    return tree


def _put_in(
    tree: Any, parameters: list[nn.Parameter], wanted: dict[str, Any], name: str = "optimizer", index: int | None = None
) -> Any:
    """The reverse of :func:`_taken_out` for an optimizer's state: empty sharded tensors, also put into ``wanted``."""
    if isinstance(tree, torch.dtype) and index is not None:
        parameter = parameters[index]
        wanted[name] = like(parameter, torch.zeros_like(processes.local(parameter), dtype=tree))
        return wanted[name]
    if not isinstance(tree, Mapping):
        return tree
    at = name.endswith(".state")
    return {
        key: _put_in(value, parameters, wanted, f"{name}.{key}", key if at else index) for key, value in tree.items()
    }
