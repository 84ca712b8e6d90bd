"""16-bit weights that small updates still move.

A bfloat16 has 8 bits of significand: an update below 1/512 of its weight is lost when it is rounded to
nearest, and towards the end of a fine-tune most of them are. Two ways out, both with the weights alone
in bfloat16 between steps:

* ``stochastic``: the float32 result is rounded up or down with probabilities that make it right on
  average, E[round(w)] = w (arXiv 2010.06192). Adding random bits below the cut and cutting does it. No memory.
* ``compensated``: what rounding took away is kept in a second bfloat16 per weight and added back at the
  next step, in the manner of Kahan; the pair has about 16 bits of significand. Two bytes per weight.

A float16 has 11 bits, and nearest will do. But its smallest number is 2⁻²⁴: AdamW's second moment, the square of a
gradient, and the 10⁻⁸ that keeps it from a division by zero, are both zero there, and weights are infinite after a
few steps. So under 16-true torch's adaptive optimizers keep float32 states too; their weights round to nearest.

The update itself runs in float32: each step widens the weights and gradients of a few parameters at a time
(``pieces``; at least one), into one piece of memory each, has the optimizer step those, and rounds that piece as a
whole: kernels are launched for each piece and not for each parameter, of which there are hundreds. So it works with
every optimizer, and the optimizer's states are those it would have for float32 weights. Parameters of other widths pass
through. On a GPU weights with 8-bit states of AdamW need no widening (``fused_updates``): each is updated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qtool.nested import NARROW
from qtool.recipe import TrainConfig
from qtool.steps.setup import Setup
from qtool.training import fused_updates, pieces
from qtool.training.block_states import SMALLEST

ADAPTIVE = ("adamw", "adafactor")
"""Optimizers of torch whose states have the dtype of the weights, and divide by what is tiny."""
ALIGNED = 64
_NAN = 0x7FC0_0000
SLICE = 2**20
"""Values that are rounded at a time on the CPU: four of them share a number drawn."""


def apply(setup: Setup, example: Any) -> None:
    """Has the optimizer that was set up so far update in float32 and round as the config says."""
    inner, config = setup.make_optimizer, setup.config

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        together = pieces.late(parameters) if config.step_in_backward else 1
        return WideUpdates(parameters, inner, config.rounding, together)

    setup.make_optimizer = make


def wanted(config: TrainConfig) -> bool:
    """Whether updates are widened."""
    return config.rounding != "nearest" or (config.precision == "16-true" and config.optimizer in ADAPTIVE)


def round_stochastically(memory: Tensor, values: list[Tensor], out: list[Any]) -> None:
    """float32 → bfloat16, to one of the two neighbours, right on average: ``values``, parts of ``memory``, are lost.

    Draws from torch's generator, 15 bits each: with r of them, the upper half of value + 2r is the answer, which a
    conversion leaves as it is. A NaN with all bits set, as GPUs make it, would go round to zero: it is made another.
    On the CPU it goes slice by slice: an addition there takes the bits once more, in 32, while it lasts.
    """
    bits = memory.view(torch.int32).view(-1)
    for part in torch.split(bits, SLICE) if bits.device.type == "cpu" else [bits]:
        part.clamp_(max=_NAN)
        torch.add(part, _random(part), alpha=2, out=part)
        part.bitwise_and_(-(2**16))
    _copy(out, values)


def _random(like: Tensor) -> Tensor:
    """int16 of 0 … 32,767. On the CPU, where drawing takes the time, four from each number drawn."""
    if like.device.type != "cpu":
        return torch.empty_like(like, dtype=torch.int16).random_()
    drawn = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_().bitwise_and_(0x7FFF_7FFF_7FFF_7FFF)
    return drawn.view(torch.int16).as_strided(like.shape, like.stride())


class WideUpdates(Optimizer):
    """Steps ``make``'s optimizer on float32 stand-ins of the parameters, a chunk at a time.

    A stand-in is empty between steps. The optimizer's states belong to the stand-ins.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make: Callable[[list[nn.Parameter]], Optimizer],
        rounding: str,
        together: int = 1,
    ) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.rounding = rounding
        self.stand_ins = {
            p: nn.Parameter(p.new_empty(0, dtype=torch.float32) if p.dtype in NARROW else p.data) for p in parameters
        }
        self.inner = make(list(self.stand_ins.values()))
        self.param_groups[0].update({k: v for k, v in self.inner.param_groups[0].items() if k != "params"})
        self.order = {parameter: i for i, parameter in enumerate(self.stand_ins)}
        self.most = together * pieces.piece(parameters, pieces.SPARE)
        if hasattr(self.inner, "make_state"):
            self._make_states()
        self.fused = fused_updates.usable(self.inner, parameters)
        self.seed: int | None = None

    @torch.no_grad()
    def _make_states(self) -> None:
        """Makes the states of what was empty when the inner optimizer was made."""
        self.inner.reserve([p.numel() for p in self.stand_ins if p.dtype in NARROW])  # type: ignore[attr-defined]
        for parameter, wide in self.stand_ins.items():
            if parameter.dtype in NARROW:
                wide.data = wide.data.new_empty(parameter.shape)
                self.inner.make_state(wide)  # type: ignore[attr-defined]
                wide.data = wide.data.new_empty(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        given = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        alone = [parameter for parameter in given if self.is_alone(parameter)]
        for parameter in alone:
            self.update_alone(parameter)
        for chunk in self._chunks(set(given).difference(alone)):
            weights = self._widen(chunk)
            self.inner.param_groups[0]["params"] = [self.stand_ins[parameter] for parameter in chunk]
            self.inner.step()
            self._round(chunk, weights)
        self.inner.param_groups[0]["params"] = list(self.stand_ins.values())
        self.seed = None

    def is_alone(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is updated by itself, so that nothing is gained by a step with others."""
        return self.fused and fused_updates.fits(parameter, self.inner.state.get(self.stand_ins[parameter], {}))

    def update_alone(self, parameter: nn.Parameter) -> None:
        """Updates one of these. Within a backward pass it is cheaper than a whole :meth:`step`, which has hooks."""
        kept = self._compensation(parameter) if self.rounding == "compensated" else None
        group = self.inner.param_groups[0] | {"lr": self.param_groups[0]["lr"]}
        state = self.inner.state[self.stand_ins[parameter]]
        fused_updates.step(parameter, group, state, kept, self._seed if self.rounding == "stochastic" else None)

    def _seed(self) -> int:
        """Another one each time. The first of a step is torch's; to draw all of them takes the host a while."""
        self.seed = int(torch.randint(2**31, ())) if self.seed is None else (self.seed + 1) % 2**31
        return self.seed

    def _chunks(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """In the model's order, in which states lie too; small parameters after the large ones of their chunk."""
        chunk: list[nn.Parameter] = []
        size = 0
        for parameter in sorted(parameters, key=self.order.__getitem__):
            if chunk and size + parameter.numel() > self.most:
                yield sorted(chunk, key=_is_small)
                chunk, size = [], 0
            chunk.append(parameter)
            size += parameter.numel()
        if chunk:
            yield sorted(chunk, key=_is_small)

    def _widen(self, chunk: list[nn.Parameter]) -> Tensor:
        """Gives stand-ins weights and gradients; returns the memory of the weights of narrow parameters."""
        narrow = _narrow(chunk)
        weights, wide = _pieces(narrow)
        _, gradients = _pieces(narrow)
        if narrow:
            _copy(wide, narrow)
            _copy(gradients, [p.grad for p in narrow if p.grad is not None])
        for parameter, weight, gradient in zip(narrow, wide, gradients, strict=True):
            stand_in = self.stand_ins[parameter]
            stand_in.grad, stand_in.data = None, weight
            stand_in.grad = gradient
        kept = [p for p in narrow if p in self.state]
        if kept:
            torch._foreach_add_([self.stand_ins[p] for p in kept], [self.state[p]["compensation"] for p in kept])
        for parameter in chunk:
            if parameter.dtype not in NARROW:
                assert parameter.grad is not None
                self.stand_ins[parameter].data = parameter.data
                self.stand_ins[parameter].grad = parameter.grad.to(parameter.dtype)
        return weights

    def _round(self, chunk: list[nn.Parameter], weights: Tensor) -> None:
        """Takes the weights back, rounded, and empties the stand-ins."""
        for parameter in chunk:
            self.stand_ins[parameter].grad = None
        narrow = _narrow(chunk)
        wide = [self.stand_ins[p].data for p in narrow]
        if narrow and self.rounding == "stochastic":
            round_stochastically(weights, wide, narrow)
        elif narrow:
            _copy(narrow, wide)
        if narrow and self.rounding == "compensated":
            self._keep(narrow, wide)
        nothing = weights.new_empty(0)
        for parameter in narrow:
            self.stand_ins[parameter].data = nothing

    def _keep(self, narrow: list[Any], wide: list[Tensor]) -> None:
        """What rounding took away; the exact values are lost."""
        torch._foreach_sub_(wide, narrow)
        _copy([self._compensation(p) for p in narrow], wide)

    def _compensation(self, parameter: nn.Parameter) -> Tensor:
        """What was kept of a parameter; zeros at first."""
        if parameter not in self.state:
            self.state[parameter]["compensation"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return self.state[parameter]["compensation"]  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the compensations, by position."""
        kept = {i: self.state[p] for i, p in enumerate(self.stand_ins) if p in self.state}
        return {"inner": self.inner.state_dict(), "state": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave."""
        self.inner.load_state_dict(state["inner"])
        parameters = list(self.stand_ins)
        for i, kept in state["state"].items():
            self.state[parameters[i]] = {name: value.to(parameters[i].device) for name, value in kept.items()}


def _copy(out: list[Any], values: list[Tensor]) -> None:
    """In one go: one pair in two orders, as of a convolution in channels-last, would have torch take each by itself."""
    alike: tuple[list[Any], list[Tensor]] = [], []
    for to, value in zip(out, values, strict=True):
        if to.stride() == value.stride():
            alike[0].append(to)
            alike[1].append(value)
        else:
            to.copy_(value)
    if alike[0]:
        torch._foreach_copy_(*alike)


def _narrow(chunk: list[Any]) -> list[Any]:
    return [p for p in chunk if p.dtype in NARROW]


def _is_small(parameter: Tensor) -> bool:
    return parameter.numel() < SMALLEST


def _pieces(parameters: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """A piece of float32 memory for all ``parameters``, and the view of each in it, which begins at 256 bytes."""
    sizes = [parameter.numel() for parameter in parameters]
    spans = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    whole = torch.empty(sum(spans), dtype=torch.float32, device=parameters[0].device if parameters else None)
    parts = zip(parameters, torch.split(whole, spans) if spans else (), sizes, strict=True)
    return whole, [
        part if part.shape == p.shape else (part if part.numel() == size else part[:size]).view(p.shape)
        for p, part, size in parts
    ]
