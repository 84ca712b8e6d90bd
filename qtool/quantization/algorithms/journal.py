"""A journal: what a pass finished, layer by layer, on disk, so that a run that was killed goes on where it was.

The key of a journal is the sha256 of everything that the pass depends on: both graphs with their weights and ranges,
the options, the calibration batches. A journal of anything else is not read, and is removed. Each part is written
under a temporary name and renamed, and a part is the numbers that the pass would write into the graph: replaying it
gives what an undisturbed run gives, bit for bit.

Whoever owns the folder removes it once what came of the pass is stored.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qtool.form import digest_tensor, graph_sha256
from qtool.nested import tensors
from qtool.quantization.algorithms.subject import Subject
from qtool.steps.trees import write_tensors
from qtool.system.files import atomic_path

State = dict[str, Tensor]


class Journal:
    """The finished parts of a pass over ``subject``, each by its name; without a scratch folder nothing is kept."""

    def __init__(self, subject: Subject, work: str) -> None:
        self.folder, self.device = None, subject.device  # type: Path | None, torch.device
        if subject.scratch is None:
            return
        self.folder = subject.scratch / f"{work}-{fingerprint(subject)}"
        for other in subject.scratch.glob(f"{work}-*"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)

    def once(self, name: str, make: Callable[[], State]) -> State:
        """What ``make`` returns for a part, or what it returned before."""
        state = self._read(name)
        if state is None:
            state = make()
            self._write(name, state)
        return state

    def _read(self, name: str) -> State | None:
        path = self._path(name)
        if path is None or not path.exists():
            return None
        try:
            return {key: value.to(self.device) for key, value in load_file(path).items()}
        except (SafetensorError, OSError):
            return None

    def _write(self, name: str, state: State) -> None:
        if (path := self._path(name)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                write_tensors(temporary, {key: value.cpu().contiguous() for key, value in state.items()})

    def _path(self, name: str) -> Path | None:
        return self.folder / f"{name}.safetensors" if self.folder is not None else None


def fingerprint(subject: Subject) -> str:
    """The sha256 of what a pass over ``subject`` depends on, in hex."""
    digest = hashlib.sha256(f"{torch.__version__} {subject.config}".encode())
    for graph in (subject.graph, subject.reference):
        digest.update(graph_sha256(graph).encode())
    for batch in subject.batches:
        for value in tensors(batch):
            digest_tensor(digest, "batch", value)
    return digest.hexdigest()
