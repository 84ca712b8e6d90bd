"""Recurrent layers traced as one operator each: torch would walk through the sequence step by step, and fix its length.

``torch.export`` keeps ``lstm``, ``gru`` and the plain cells whole in its graph, but to learn the shapes of what they
give it runs their decomposition on fake tensors, one step after the other: a sequence's length becomes a constant, and
tracing takes time for each step. The shapes follow from those of the input and the state,

    x: N × L × K (or L × N × K),  h: layers·D × N × H   →   N × L × D·H,  and the states as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor

_OPERATORS = tuple(getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))

_BIDIRECTIONAL = 5
"""Its place behind the input and the state: weights, biases, layers, dropout, training, directions, batch first."""


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Lets recurrent operators tell their shapes at once where they are traced in this block."""
    before = {operator: dict(operator.py_kernels) for operator in _OPERATORS}
    table = {operator: decomposition_table[operator] for operator in _OPERATORS if operator in decomposition_table}
    for operator, kernels in before.items():
        _use(operator, {key: _shaped(kernel) for key, kernel in kernels.items()})
    decomposition_table.update({operator: _shaped(kernel) for operator, kernel in table.items()})
    try:
        yield
    finally:
        decomposition_table.update(table)
        for operator, kernels in before.items():
            _use(operator, kernels)


def _use(operator: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def _shaped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that gives fake tensors of the right shapes for fake ones."""

    def made(x: Tensor, state: Any, *rest: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return kernel(x, state, *rest)
        width = 2 if rest[_BIDIRECTIONAL] else 1
        states = list(state) if isinstance(state, list | tuple) else [state]
        given = x.new_empty((*x.shape[:-1], states[0].shape[-1] * width))
        return (given, *(torch.empty_like(value) for value in states))

    return made
