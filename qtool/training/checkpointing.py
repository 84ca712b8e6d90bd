"""Activation checkpointing: keep what goes into each block, recompute the rest when the backward pass needs it.

A network of L equal blocks then holds L inputs and the inside of one block, for one more forward pass
(arXiv 1604.06174). The results are the same, bit for bit: random generators are put back before a block
is recomputed, and its batch-norm statistics do not move a second time.

Blocks are found by repetition: the outermost modules with children whose class occurs at least twice
as items of a ``ModuleList`` or ``Sequential`` (transformer layers, residual blocks), and where there are
none, whose class occurs twice anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qtool.errors import QtoolError
from qtool.step import Setup

_LISTS = (nn.Sequential, nn.ModuleList)


def apply(setup: Setup, example: Any) -> None:
    """Checkpoints every block of the model. Raises QtoolError where no blocks are found."""
    found = blocks(setup.model)
    if not found:
        raise QtoolError(
            "--activation-checkpointing", "a model with repeated blocks", f"a {type(setup.model).__name__} without any",
            "leave it out",
        )  # fmt: skip
    for block in found.values():
        _wrap(block)
        setup.on_close.append(lambda block=block: delattr(block, "forward"))  # type: ignore[misc]


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks by name, in order."""
    items = Counter(
        type(child) for parent in model.modules() if type(parent) in _LISTS for child in parent.children() if _is(child)
    )
    anywhere = Counter(type(module) for module in model.modules() if module is not model and _is(module))
    kinds = {kind for kind, count in items.items() if count > 1} or {kind for kind, n in anywhere.items() if n > 1}
    return dict(_outermost(model, "", kinds))


def _is(module: nn.Module) -> bool:
    return type(module) not in _LISTS and next(module.children(), None) is not None


def _outermost(module: nn.Module, name: str, kinds: set[type]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}".strip(".")
        if type(child) in kinds:
            yield path, child
        else:
            yield from _outermost(child, path, kinds)


def _wrap(block: nn.Module) -> None:
    """Sets the block's ``forward``; no parameter changes its name, as it would within a wrapping module."""
    forward = block.forward
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _still(norms)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        more: dict[str, Any] = {"context_fn": contexts} if norms else {}
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    block.forward = checkpointed


@contextmanager
def _still(norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Running statistics stay as they are inside the block: a momentum of zero, and the count put back."""
    moving = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.training]
    for norm, _, count in moving:
        norm.momentum = 0.0
        norm.num_batches_tracked = count if count is None else count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in moving:
            norm.momentum, norm.num_batches_tracked = momentum, count
