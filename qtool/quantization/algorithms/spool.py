"""Spool: where the values of a walk stand between two layers, the fastest place first.

On a GPU what fits into a share of its memory stays there, so that learning a layer reads nothing across the bus; then
host memory up to a budget of bytes, page-locked beside a GPU; beyond that a file for each value in a temporary
folder. Whatever the place, a value is asked for by node and batch and comes to the walk's device, whole, in one
transfer; it stays at hand until another batch of its node is asked for. A tensor of a walk changes its device here.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qtool.system.devices import memory_free
from qtool.system.temporary import Folder

CPU = torch.device("cpu")
BUDGET = 2**30
"""Bytes of layer inputs that are held in host memory; what is beyond them is written to files."""
SHARE = 0.3
"""How much of a GPU's free memory each of the two walks of a reconstruction may fill."""


class Store:
    """Values by node and batch, given back on ``device``: see the module's text. ``budget`` is in bytes, the host's."""

    def __init__(self, budget: int = BUDGET, device: torch.device = CPU) -> None:
        self.device = device
        self.budgets = ({} if device == CPU else {device: int(SHARE * memory_free(device))}) | {CPU: budget}
        self.used: Counter[torch.device] = Counter()
        self._memory: dict[Node, dict[int, Any]] = {}
        self._files: dict[Node, dict[int, Path]] = {}
        self._last: dict[Node, tuple[int, Tensor]] = {}
        self._folder: Folder | None = None

    def put(self, node: Node, index: int, value: Any) -> None:
        """Stores a value in place of an earlier one; a tensor that fits nowhere else goes to a file."""
        self._forget(node, index)
        size = value.nbytes if isinstance(value, Tensor) else 0
        place = next((where for where, most in self.budgets.items() if self.used[where] + size <= most), None)
        if size and place is None:
            self._files.setdefault(node, {})[index] = self._write(value)
            return
        if isinstance(value, Tensor):
            value = _moved(value, place or self.device)
            self.used[value.device] += size
        self._memory.setdefault(node, {})[index] = value

    def get(self, node: Node, index: int) -> Any:
        """The value stored for a node and a batch; of each node the one asked for last stays at hand."""
        value = self._memory.get(node, {}).get(index)
        if value is not None and (not isinstance(value, Tensor) or value.device == self.device):
            return value
        if self._last.get(node, (-1,))[0] != index:
            self._last[node] = index, (self._read(node, index) if value is None else value).to(self.device)
        return self._last[node][1]

    def _read(self, node: Node, index: int) -> Tensor:
        value: Tensor = torch.load(self._files[node][index], weights_only=True)
        return value

    def drop(self, node: Node) -> None:
        """Forgets what was stored for a node."""
        self._last.pop(node, None)
        for value in self._memory.pop(node, {}).values():
            self._release(value)
        for path in self._files.pop(node, {}).values():
            path.unlink(missing_ok=True)

    def _forget(self, node: Node, index: int) -> None:
        if self._last.get(node, (-1,))[0] == index:
            del self._last[node]
        self._release(self._memory.get(node, {}).pop(index, None))
        if (path := self._files.get(node, {}).pop(index, None)) is not None:
            path.unlink(missing_ok=True)

    def _release(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.used[value.device] -= value.nbytes

    def close(self) -> None:
        """Removes everything, files included."""
        self._memory.clear()
        self._last.clear()
        self._files.clear()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _write(self, value: Tensor) -> Path:
        if self._folder is None:
            self._folder = Folder("walk")
        descriptor, name = tempfile.mkstemp(dir=self._folder.path, suffix=".pt")
        with open(descriptor, "wb") as file:
            torch.save(value.to(CPU).clone(), file)
        return Path(name)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from a GPU into page-locked memory, out of which it goes back faster."""
    if device != CPU or not value.is_cuda:
        return value.to(device)
    return torch.empty_like(value, device=CPU, pin_memory=True).copy_(value)
