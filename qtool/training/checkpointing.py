"""Activation checkpointing: keep what goes into each block, recompute the rest when the backward pass needs it.

A network of L equal blocks then holds L inputs and the inside of one block, for one more forward pass
(arXiv 1604.06174). The results are the same, bit for bit: random generators are put back before a block
is recomputed, and so are buffers that it moves (of a spectral norm, of a codebook that learns); its batch-norm
statistics do not move a second time. A block that writes over its input cannot be computed again, and is refused.

What an operator of a block would keep is counted and dropped (``saved_tensors_hooks``); whoever asks for any of it has
the block run again, up to the last that was kept. torch has the same, for more cases than a step has, and its books for
each tensor take as long as launching the block does, which a fast GPU waits for. Inputs are kept as an operator keeps
them, so that they may be offloaded.

Where a compiler traces the model, it is given torch's own, which it knows: what it computes again moves no statistics.
Called by itself, as it is where a block's graph breaks, torch's would move them twice: such a block is compiled by
itself, and checkpointed from without.

Blocks are found by repetition: the outermost modules with children whose class occurs at least twice
as items of a ``ModuleList`` or ``Sequential`` (transformer layers, residual blocks; one that stands there several times
too), and where there are none, whose class occurs twice anywhere. Where there are none of those either, each
``Sequential`` that is an item of a list beside another is checkpointed: a model that takes it apart saves nothing by
it, and computes the same.

transformers' models remember keys and values for generating, and a block that finds its own there does less the second
time. They do without while they train.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.parametrize import type_before_parametrizations as kind
from torch.utils.checkpoint import checkpoint

from qtool.errors import QtoolError, UsageError, kind_of
from qtool.models.specs import without_cache
from qtool.nested import tensors
from qtool.recipe import TrainConfig
from qtool.steps import forwards
from qtool.steps.setup import Setup
from qtool.system.generators import of_modules, own_state, put_back

Norm = nn.modules.batchnorm._BatchNorm
_PLAIN = (Norm.forward, nn.SyncBatchNorm.forward)
"""What reads no running statistics while it moves them; a norm that does more has buffers like any other module."""
_LISTS = (nn.Sequential, nn.ModuleList)
_KINDS = ("cpu", "cuda")
"""Of devices, on which autocast may be on."""
_WRITTEN_OVER = "modified by an inplace operation"
"""What torch says of a kept tensor that is not as it was."""


def apply(setup: Setup, example: Any) -> None:
    """Checkpoints every block of the model."""
    stack = ExitStack()
    stack.enter_context(without_cache(setup.model))
    setup.on_close.append(stack.close)
    for block in _recomputed(setup.model).values():
        setup.on_close.append(_Block(block).give_back)


def require(model: nn.Module, config: TrainConfig) -> None:
    """Raises UsageError where no blocks are found."""
    if not _recomputed(model):
        raise UsageError(
            "--activation-checkpointing", "a model with repeated blocks", f"{kind_of(model)} without any",
            "leave it out",
        )  # fmt: skip


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks by name, in order."""
    items = Counter(
        kind(child) for parent in model.modules() if type(parent) in _LISTS for child in _items(parent) if _is(child)
    )
    anywhere = Counter(kind(module) for module in model.modules() if module is not model and _is(module))
    kinds = {kind for kind, count in items.items() if count > 1} or {kind for kind, n in anywhere.items() if n > 1}
    return dict(_outermost(model, "", lambda module: kind(module) in kinds))


def _recomputed(model: nn.Module) -> dict[str, nn.Module]:
    """What is checkpointed, by name, in order: the model's blocks, or else sequences side by side in a list."""
    beside: set[int] = set()
    for parent in model.modules():
        if type(parent) in _LISTS:
            items = [id(child) for child in _items(parent) if type(child) is nn.Sequential and len(child)]
            beside |= set(items if len(items) > 1 else [])
    return blocks(model) or dict(_outermost(model, "", lambda module: id(module) in beside))


def _items(parent: nn.Module) -> Iterator[nn.Module]:
    """What stands in a list, as often as it stands there."""
    return (child for child in parent._modules.values() if child is not None)


def _is(module: nn.Module) -> bool:
    """Whether a module may be a block: it is called itself, and consists of others that are no parametrizations."""
    called = type(module) not in _LISTS and type(module).forward is not nn.Module.forward
    inside = (name for name, _ in module.named_children() if name != "parametrizations" or not is_parametrized(module))
    return called and not isinstance(module, ParametrizationList) and next(inside, None) is not None


def _outermost(module: nn.Module, name: str, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        path = f"{name}.{key}".strip(".")
        if wanted(child):
            yield path, child
        else:
            yield from _outermost(child, path, wanted)


class _Block:
    """A block with its ``forward`` set; no parameter changes its name, as it would within a wrapping module."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward, self.generators = block, block.forward, _Generators(block)
        self.norms = [m for m in block.modules() if isinstance(m, Norm) and type(m).forward in _PLAIN]
        self.buffers, self.all_buffers = _Buffers(block, self.norms), _Buffers(block)
        self.compiled: Callable[..., Any] | None = None
        traced = _traced()

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                return traced(self, args, kwargs)
            return _Pass(self.forward, self.norms, self.buffers, self.generators)(*args, **kwargs)

        self.give_back = forwards.take_place(block, checkpointed)

    def by_itself(self, args: Any, kwargs: Any) -> Any:
        """A compiled pass, checkpointed from without. The same graphs are run again, so all buffers are put back."""
        if self.compiled is None:
            self.compiled = forwards.compiled(self.forward, self.block)
        return _Pass(self.compiled, [], self.all_buffers, self.generators)(*args, **kwargs)


@cache
def _traced() -> Callable[[_Block, Any, Any], Any]:
    """A pass through a block: torch's own checkpointing where it is traced, the block's where its graph breaks."""

    def broken(block: _Block, args: Any, kwargs: Any) -> Any:
        return block.by_itself(args, kwargs)

    def whole(block: _Block, args: Any, kwargs: Any) -> Any:
        return checkpoint(block.forward, *args, use_reentrant=False, **kwargs)

    untraced: Callable[[_Block, Any, Any], Any] = torch.compiler.disable(broken)  # type: ignore[no-untyped-call]
    torch.compiler.substitute_in_graph(untraced)(whole)
    return untraced


class _Pass:
    """One pass through a block, and what it takes to make it again."""

    def __init__(
        self, forward: Callable[..., Any], norms: list[Norm], buffers: _Buffers, generators: _Generators
    ) -> None:
        self.forward, self.norms, self.buffers, self.generators = forward, norms, buffers, generators
        self.count = 0
        self.made: list[Any] = []
        """What the block's operators keep, while the backward pass goes through it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _KINDS]
        self.kwargs, self.inputs = kwargs, _Inputs.apply(torch.empty(0, requires_grad=True), *args)  # type: ignore[no-untyped-call]
        states = self.generators.states()
        within = tensors(([value for value in args if not isinstance(value, Tensor)], kwargs))
        self.versions = [(tensor, tensor._version) for tensor in within]
        buffers = self.buffers.copied()
        with torch.autograd.graph.saved_tensors_hooks(self._drop, self._find):
            result = self.forward(*args, **kwargs)
        self.drawn = self.generators.moved(states)
        self.moved = self.buffers.moved(buffers)
        return result

    def _drop(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def _find(self, index: int) -> Tensor:
        if not self.made or self.made[index] is None:
            self._again()
        found: Tensor = self.made[index]
        self.made[index] = None
        return found

    def _again(self) -> None:
        made: list[Any] = []

        def keep(tensor: Tensor) -> None:
            made.append(tensor.detach() if tensor.requires_grad else tensor)
            if len(made) == self.count:
                raise _Enough

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_still(self.norms))
            stack.enter_context(_as_before(self.moved))
            stack.enter_context(_put_back(self.drawn))
            for kind, dtype, enabled in self.casts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, _never))
            stack.enter_context(suppress(_Enough))
            self.forward(*self._arguments(), **self.kwargs)
        if len(made) != self.count:
            raise QtoolError(
                "--activation-checkpointing", f"{self.count} tensors that a block keeps for its backward pass",
                f"{len(made)} when it was computed again", "leave it out: the block does not do the same twice",
            )  # fmt: skip
        self.made = made

    def _arguments(self) -> list[Any]:
        """Those that the block was given by position. Raises QtoolError where any of its inputs is not what it was."""
        try:
            if all(tensor._version == version for tensor, version in self.versions):
                return _arguments(self.inputs.grad_fn)
        except RuntimeError as error:
            if _WRITTEN_OVER not in str(error):
                raise
        raise QtoolError(
            "--activation-checkpointing", "blocks that leave what they are given as it is, to be computed again",
            "one that writes over it", "build activations with inplace=False, or leave it out",
        )  # fmt: skip


class _Enough(Exception):
    """All that a block's operators keep is there; the rest of it need not be computed."""


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing goes backward through a block's second pass")


class _Inputs(torch.autograd.Function):
    """Keeps a block's arguments as an operator would: tensors go through whatever hooks there are."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *args: Any) -> Tensor:
        ctx.places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        ctx.rest = [None if isinstance(value, Tensor) else value for value in args]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing is computed from it")


def _arguments(context: Any) -> list[Any]:
    values = list(context.rest)
    for i, value in zip(context.places, context.saved_tensors, strict=True):
        values[i] = value
    return values


States = list[tuple[Any, Any]]


class _Generators:
    """The generators that a block draws from: torch's, Python's, numpy's and those that it has for itself.

    To ask all but torch's takes as long as a few kernels do, so the first pass tells which of them it draws from.
    """

    def __init__(self, block: nn.Module) -> None:
        everyones = random.getstate.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
        self.others = [*everyones, *of_modules(block).values()]
        self.first = True

    def states(self) -> States:
        """Each and its state."""
        found = [torch.default_generator, *self.others]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found.append(torch.cuda.default_generators[torch.cuda.current_device()])
        return [(generator, own_state(generator)) for generator in found]

    def moved(self, before: States) -> States:
        """Those of them that are no longer in that state."""
        found = [(generator, state) for generator, state in before if not _same(own_state(generator), state)]
        if self.first:
            drawn = {id(generator) for generator, _ in found}
            self.others, self.first = [generator for generator in self.others if id(generator) in drawn], False
        return found


def _same(a: Any, b: Any) -> bool:
    """Whether two states of a generator are equal; of tensors their bytes, of which fake operators tell nothing."""
    if isinstance(a, Tensor):
        return ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)
    if isinstance(a, dict):
        return all(_same(value, b[key]) for key, value in a.items())
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


@contextmanager
def _put_back(states: States) -> Iterator[None]:
    """Generators are in those states inside the block, and after it where they were before."""
    now = [(generator, own_state(generator)) for generator, _ in states]
    for generator, state in states:
        put_back(generator, state)
    try:
        yield
    finally:
        for generator, state in now:
            put_back(generator, state)


Place = tuple[nn.Module, str]


class _Buffers:
    """The buffers that a block moves as it runs, beside those of some ``norms``.

    Which ones these are its first pass tells, for which all of them are copied. One that begins to move later is known
    from then on. In the pass that begins it, one that is written over keeps what it moved to: what it held is gone.
    """

    def __init__(self, block: nn.Module, norms: Collection[nn.Module] = ()) -> None:
        self.places = [(m, name) for m in block.modules() if m not in norms for name in m._buffers]
        self.moving: set[Place] | None = None

    def copied(self) -> dict[Place, tuple[Tensor, int, Tensor | None]]:
        """Each buffer as it is now, its version, and a copy of it where it may move."""
        found = {}
        for module, name in self.places:
            if (buffer := module._buffers.get(name)) is not None:
                moves = self.moving is None or (module, name) in self.moving
                found[module, name] = buffer, buffer._version, buffer.clone() if moves else None
        return found

    def moved(self, before: dict[Place, tuple[Tensor, int, Tensor | None]]) -> dict[Place, Tensor]:
        """What those that have moved since held before."""
        found = {}
        for (module, name), (buffer, version, copy) in before.items():
            written = buffer._version != version or isinstance(module, Norm)  # of whose writing torch tells nothing
            if written or module._buffers.get(name) is not buffer:
                found[module, name] = copy if copy is not None else buffer.clone() if written else buffer
        self.moving = (self.moving or set()).union(found)
        return found


@contextmanager
def _as_before(moved: dict[Place, Tensor]) -> Iterator[None]:
    """Inside the block those buffers hold what they held, and after it what they do now."""
    now = {(module, name): module._buffers[name] for module, name in moved}
    for (module, name), value in moved.items():
        module._buffers[name] = value.clone()
    try:
        yield
    finally:
        for (module, name), buffer in now.items():
            module._buffers[name] = buffer


@contextmanager
def _still(norms: list[Norm]) -> Iterator[None]:
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
