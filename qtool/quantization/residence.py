"""Where a graph is computed: its tensors, its constants and the devices that its operators name, moved as one.

A model is captured on the CPU, and a graph remembers that: an ``arange`` or a conversion has the device among its
arguments. What runs samples through a graph (calibration, the passes for accuracy) may do so elsewhere: ``on`` takes
the graph there and brings it back, so that everything else, capture and conversion among it, sees host memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from qtool.nested import map_tensors
from qtool.quantization.rewrites.norms import NORMAL

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
    graph.to(device)
    named = False
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            _move_constant(graph, str(node.target), device)
        if NORMAL in node.meta:
            node.meta[NORMAL] = tuple(value.to(device) for value in node.meta[NORMAL])
        found = map_aggregate((node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a)
        if found != (node.args, node.kwargs):
            node.args, node.kwargs = found
            named = True
    if named:
        graph.recompile()


def _move_constant(graph: GraphModule, path: str, device: torch.device) -> None:
    """Moves a tensor that is neither a parameter nor a buffer."""
    holder_path, _, name = path.rpartition(".")
    holder = graph.get_submodule(holder_path)
    value = vars(holder).get(name)
    if isinstance(value, Tensor):
        setattr(holder, name, value.to(device))
