"""Where a graph is computed: calibration and the passes for accuracy may run samples through it on a GPU.

``on`` takes the graph there and brings it back, so that everything else, capture and conversion among it, sees host
memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.fx import GraphModule

from qtool.nested import map_tensors
from qtool.quantization.rewrites.norms import NORMAL
from qtool.system.devices import move_graph

CPU = torch.device("cpu")


def device_of(graph: GraphModule) -> torch.device:
    """Where the tensors of a graph are; the CPU for a graph without any."""
    return next((value.device for value in chain(graph.parameters(), graph.buffers())), CPU)


@contextmanager
def on(device: torch.device, *graphs: GraphModule) -> Iterator[None]:
    """Has graphs on a device for a while, in place, and on the CPU again afterwards."""
    try:
        for graph in graphs:
            _move(graph, device)
        yield
    finally:
        for graph in graphs:
            _move(graph, CPU)


class Moved:
    """Batches that come to a device as they are gone through, again and again where the given ones allow it."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield map_tensors(lambda tensor: tensor.to(self.device), batch)


def _move(graph: GraphModule, device: torch.device) -> None:
    move_graph(graph, device)
    for node in graph.graph.nodes:
        if NORMAL in node.meta:
            node.meta[NORMAL] = tuple(value.to(device) for value in node.meta[NORMAL])
