"""Sizes of a captured graph: those that are numbers, and those that are open and stand for any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule


def symbols_of(size: int | torch.SymInt) -> set[Any]:
    """The symbols that a size is computed from; none of a number."""
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def same_sizes(left: Iterable[int | torch.SymInt], right: Iterable[int | torch.SymInt]) -> bool:
    """Whether two shapes are known to be equal, whatever the open sizes are.

    To compare an open size with a number is to fix it for the whole graph, where the batch at hand happens to have that
    size. So open sizes are compared as they are spelled.
    """
    return [*map(str, left)] == [*map(str, right)]


def input_values(graph: torch.fx.Graph) -> dict[str, torch.Tensor]:
    """What is known of the tensors that a captured graph takes, by name, in order."""
    known = {str(node.target): node.meta.get("val") for node in graph.nodes if node.op == "placeholder"}
    return {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}


def batch_symbols(graph: torch.fx.Graph) -> set[Any]:
    """The symbols that count the samples of a captured graph's inputs."""
    return {symbol for value in input_values(graph).values() if value.dim() for symbol in symbols_of(value.shape[0])}


def open_axes(model: torch.nn.Module) -> set[int]:
    """The axes behind the batch whose size a captured graph leaves open in some input; none of any other module."""
    values = input_values(model.graph).values() if isinstance(model, GraphModule) else ()
    return {axis for value in values for axis, size in enumerate(value.shape) if axis and symbols_of(size)}
