"""Sizes that depend on values, from a forward pass for real.

Models choose by values: which rows an expert takes, how far the longest sentence goes, whether a branch is worth its
while. Fake tensors have none to ask. Where a prediction meets such a question, the model is run once on the batch at
hand, forward alone, without gradients, and what came out is kept: the number that was asked for, how much a mask
selects, the shapes of a result. The prediction is then made again with those answers in the order in which they came,
for each module and operator by itself, so that a block that is computed again is told the same again.

Weights are those that the model has, or is made with: those of a router that has learned may share rows out otherwise.

Left out on purpose: models whose weights take more than ``LARGEST``, and passes of more than ``WORK``, which would
take what a prediction is there to spare. Those get the guesses of ``qtool.memory.fakes``.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from qtool.models.specs import copied
from qtool.nested import num_samples, samples_of
from qtool.steps.setup import LossFunction

LARGEST = 512 * 2**20
"""Bytes of parameters and buffers up to which a model is run."""
WORK = 1e12
"""Floating-point operations up to which a batch is run through it: half a minute of a CPU's core."""
SOME = 2
"""Samples by which the work is judged."""
_SIZED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
PACKING = "_pack_padded_sequence"
"""Its counts of samples by length are read past the dispatcher by all that takes packed sequences."""
_OTHERS = (PACKING, "index_put", "index_put_", "_index_put_impl_")
"""Operators that ask for values without the tag."""
SELECTING = ("index", "nonzero", "masked_select", "index_put", "index_put_", "_index_put_impl_")
"""Those that count what a mask selects."""

Place = tuple[str, str]
"""The name of a module, and of an operator that it calls."""


def asks(func: Any, args: Any) -> bool:
    """Whether an operator's result, or its size, depends on values of its operands."""
    name = func.overloadpacket.__name__
    if name in SELECTING:
        return bool(masks(name, args))
    return name in _OTHERS or any(tag in func.tags for tag in _SIZED_BY_VALUES)


def masks(name: str, args: Any) -> list[Tensor]:
    """The tensors whose values such an operator counts."""
    if name == "nonzero":
        return [args[0]]
    return [t for t in tree_flatten(args[1])[0] if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]


class Answers:
    """What was asked in one forward pass, and what came out."""

    def __init__(self) -> None:
        self.found: dict[Place, list[Any]] = defaultdict(list)
        self._at: Counter[Place] = Counter()

    def begin(self) -> None:
        """A forward pass begins."""
        self._at.clear()

    def next(self, place: Place) -> Any:
        """What came out here, in order, over and over; None where nothing was asked."""
        if not (found := self.found.get(place)):
            return None
        self._at[place] += 1
        return found[(self._at[place] - 1) % len(found)]


class AtWork:
    """Which module of a model is at work, by name; "" for the model itself, None for what is around it."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def __call__(self) -> str | None:
        return self._names[-1] if self._names else None

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Inside the block each call of a module of ``model`` is known; what recomputes a block calls it likewise."""
        found = [(name, module) for name, module in model.named_modules() if "forward" not in vars(module)]
        found = [(name, module) for name, module in found if not isinstance(module, torch.jit.ScriptModule)]
        for name, module in found:
            vars(module)["forward"] = self._named(name, module.forward)
        try:
            yield
        finally:
            for _, module in found:
                vars(module).pop("forward", None)

    def _named(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def named(*args: Any, **kwargs: Any) -> Any:
            self._names.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._names.pop()

        return named


class Oracle:
    """Answers for a prediction: those of each micro-batch in turn, or none."""

    def __init__(self, answers: Sequence[Answers] | None = None) -> None:
        self.answers, self.at_work = answers, AtWork()
        self.guessed = False
        """Whether something was asked that is not known."""
        self._number, self._around = 0, False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of a micro-batch and its loss."""
        if self.answers:
            self._now = self.answers[self._number % len(self.answers)]
            self._now.begin()
        self._number, self._around = self._number + 1, True
        try:
            yield
        finally:
            self._around = False

    def ask(self, operator: str, *, needed: bool = True) -> Any:
        """What the operator gave for real, or None, which is a guess where that is ``needed``."""
        place = self.at_work() or ("" if self._around else None)
        found = self._now.next((place, operator)) if self.answers and place is not None else None
        self.guessed = self.guessed or (needed and found is None and self._around)
        return found


class Trials:
    """The answers for each micro-batch of a batch, by the micro-batches' sizes; made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], list[Answers] | None] = {}

    def known(self, parts: Sequence[Any]) -> list[Answers] | None:
        """What is there already."""
        return self._made.get(_sizes(parts))

    def of(self, build: Callable[[], nn.Module], parts: Sequence[Any], loss: LossFunction) -> list[Answers] | None:
        """The answers for micro-batches ``parts`` of (input, target); None where the model is too large or fails."""
        sizes = _sizes(parts)
        if sizes not in self._made:
            try:
                self._made[sizes] = _tried(build, parts, loss)
            except Exception:  # what is wrong with the model is told by the step itself
                self._made[sizes] = None
        return self._made[sizes]


def _sizes(parts: Sequence[Any]) -> tuple[int, ...]:
    return tuple(num_samples(value) for value, _ in parts)


@torch.no_grad()
def _tried(build: Callable[[], nn.Module], parts: Sequence[Any], loss: LossFunction) -> list[Answers] | None:
    with torch.random.fork_rng(devices=[]):
        model = build()
        if sum(t.nbytes for t in (*model.parameters(), *model.buffers())) > LARGEST:
            return None
        model = copied(model, {}).cpu().float().train()
        with FlopCounterMode(display=False) as counter:
            some = samples_of(parts[0], 0, SOME)
            loss(model, *some)
        if counter.get_total_flops() * sum(_sizes(parts)) > WORK * num_samples(some[0]):
            return None
        return [_answers(model, value, target, loss) for value, target in parts]


def _answers(model: nn.Module, value: Any, target: Any, loss: LossFunction) -> Answers:
    recorder = Recorder()
    with recorder.at_work.watched(model), recorder, mock.patch.object(Tensor, "tolist", _listed):
        loss(model, value, target)
    return recorder.answers


def _listed(tensor: Tensor) -> Any:
    """As a fake tensor lists its values: one by one."""
    return [_listed(part) for part in tensor] if tensor.dim() else tensor.item()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what operators that ask for values gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers, self.at_work = Answers(), AtWork()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if asks(func, args):
            name = func.overloadpacket.__name__
            self.answers.found[self.at_work() or "", name].append(_told(name, args, result))
        return result


def _told(name: str, args: Any, result: Any) -> Any:
    if name in SELECTING:
        return [int(mask.count_nonzero()) for mask in masks(name, args)]
    if name == PACKING:
        return result[0].to("meta"), result[1]
    return tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), result)
