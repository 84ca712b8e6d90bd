"""A model's forward and backward pass in a step, and what is said where one fails.

What torch raises there names an operator and two dtypes; what helps is which flag, or which line of the model, to
change. :func:`answer` and :func:`backward_told` say that where it can be told from torch's words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.errors import FAILED_COMPILERS, QtoolError
from qtool.forward import passes_told
from qtool.nested import call, no_floats, num_samples

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""What torch's batch-norm says of a single sample without further dimensions."""
_NOT_IN_16_BITS = re.compile("(implemented for '|nsupported dtype )(Half|BFloat16)|could not create a primitive desc")
"""What is said where an operator does not know a type of 16 bits on this device; the last by oneDNN's layers."""
_TYPES_DIFFER = re.compile(
    "same (dtype|scalar type)|expected (scalar type|dtype)|to have scalar type|Input type .* and (weight|bias)"
    "|dtypes (match|must be the same)|dtype to be equal|not match weight dtype"
)
"""What is said where a tensor was cast and one that it meets was not."""
_NOT_GATHERED = ("torch.Tensor and DTensor", "out of bounds for storage of size 0")
"""What is said where a weight that lies in parts is computed with."""
_BACKWARD = (
    ("modified by an inplace operation", "write over nothing that a gradient needs: x = x * 2 instead of x *= 2"),
    ("through the graph a second time", "have the model detach what it keeps from one batch to the next"),
)
"""What torch says where a backward pass fails, and what to do."""


def answer(model: Callable[[Any], Any], value: Any) -> Any:
    """The output of ``model`` for an input. Raises QtoolError where it does not take that: see ``passes_told``."""
    expected = "a forward pass on the inputs of the data"
    try:
        usual = "give a model and data that go together; --debug shows where it failed"
        with passes_told("model", expected, usual, model):
            _require_more_than_one(model, value)
            return call(model, value)
    except QtoolError as error:
        do = no_floats(error.__cause__, value)
        if _ONE_VALUE in error.got:
            do = (
                "take a --batch-size, or give batches, that leave every micro-batch of every process two samples for "
                "batch-norm"
            )
        do = _technique_at_fault(error.got) or do
        if do is None and _TYPES_DIFFER.search(error.got):
            do = "give inputs, weights and buffers of one type of floats (--precision 32-true casts none of them)"
        if do is None:
            raise
        raise QtoolError("model", expected, error.got, do) from error.__cause__


@contextmanager
def backward_told() -> Iterator[None]:
    """Raises QtoolError where the backward pass, the block, fails: by the model's code or by the task's."""
    expected = "a backward pass from the loss"
    usual = "correct the model, or the task's loss; --debug shows where it failed"
    try:
        with passes_told("model", expected, usual):
            yield
    except QtoolError as error:
        if error.do != usual:
            raise
        do = _technique_at_fault(error.got) or next((do for said, do in _BACKWARD if said in error.got), usual)
        raise QtoolError("model", expected, error.got, do) from error.__cause__


def _technique_at_fault(got: str) -> str | None:
    """What to do where it is how a model is run that fails, and not the model; None where nothing says so."""
    if _NOT_IN_16_BITS.search(got):
        return "take another --precision: this device has no such operator for this one, and has all for 32-true"
    if got.startswith(FAILED_COMPILERS):
        return "the model is not at fault: see with --debug what the compiler says, or leave --compile out"
    if any(said in got for said in _NOT_GATHERED):
        return "pass --strategy ddp: fsdp gathers the weights of a block while it is called, block(x), and no longer"
    return None


def _require_more_than_one(model: Callable[[Any], Any], value: Any) -> None:
    """Raises what torch's batch-norm raises for one value per channel, of which a captured one makes NaN."""
    if num_samples(value) == 1 and isinstance(model, GraphModule) and any(map(_is_of_features, model.graph.nodes)):
        raise ValueError(f"{_ONE_VALUE}, got a single sample")


def _is_of_features(node: Node) -> bool:
    """Whether it is a live batch-norm that has one value per channel of a sample."""
    if node.target is not torch.ops.aten.batch_norm.default or not node.args[5]:
        return False
    shape = node.meta["val"].shape
    return all(isinstance(size, int) and size == 1 for size in shape[2:])
