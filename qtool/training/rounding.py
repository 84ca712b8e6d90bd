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

The update itself runs in float32: each step widens the weights and gradients of a few parameters at a
time, has the optimizer step those, and rounds. So it works with every optimizer, and the optimizer's
states are those it would have for float32 weights. Parameters of other widths pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qtool.recipe import TrainConfig
from qtool.step import Setup

NARROW = (torch.float16, torch.bfloat16)
ADAPTIVE = ("adamw", "adafactor")
"""Optimizers of torch whose states have the dtype of the weights, and divide by what is tiny."""
CHUNK = 4 * 2**20
"""Weights widened at a time (at least one parameter): 16 MiB for them, and as much for their gradients."""


def apply(setup: Setup, example: Any) -> None:
    """Has the optimizer that was set up so far update in float32 and round as the config says."""
    inner, rounding = setup.make_optimizer, setup.config.rounding
    setup.make_optimizer = lambda parameters: WideUpdates(parameters, inner, rounding)


def wanted(config: TrainConfig) -> bool:
    """Whether updates are widened."""
    return config.rounding != "nearest" or (config.precision == "16-true" and config.optimizer in ADAPTIVE)


def round_stochastically(value: Tensor, out: Tensor) -> None:
    """float32 → bfloat16, of any one shape: to one of the two neighbours, right on average; ``value`` is lost.

    Draws from torch's generator, 15 bits each: with r of them, the upper half of value + 2r is the answer.
    """
    bits = value.view(torch.int32)
    torch.add(bits, _random(value), alpha=2, out=bits)
    torch.bitwise_right_shift(bits, 16, out=out.view(torch.int16))


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
        self, parameters: list[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer], rounding: str
    ) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.rounding = rounding
        self.stand_ins = {
            p: nn.Parameter(p.new_empty(0, dtype=torch.float32) if p.dtype in NARROW else p.data) for p in parameters
        }
        self.inner = make(list(self.stand_ins.values()))
        self.param_groups[0].update({k: v for k, v in self.inner.param_groups[0].items() if k != "params"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for chunk in self._chunks():
            for parameter in chunk:
                self._widen(parameter)
            self.inner.param_groups[0]["params"] = [self.stand_ins[parameter] for parameter in chunk]
            self.inner.step()
            for parameter in chunk:
                self._round(parameter)
        self.inner.param_groups[0]["params"] = list(self.stand_ins.values())

    def _chunks(self) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        size = 0
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if chunk and size + parameter.numel() > CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append(parameter)
            size += parameter.numel()
        if chunk:
            yield chunk

    def _widen(self, parameter: nn.Parameter) -> None:
        wide = self.stand_ins[parameter]
        wide.grad = None
        if parameter.dtype in NARROW:
            wide.data = parameter.float()
            if parameter in self.state:
                wide.data += self.state[parameter]["compensation"]
        assert parameter.grad is not None
        wide.grad = parameter.grad.to(wide.dtype)

    def _round(self, parameter: nn.Parameter) -> None:
        wide = self.stand_ins[parameter]
        wide.grad = None
        if parameter.dtype not in NARROW:
            return
        if self.rounding == "stochastic":
            round_stochastically(wide.data, parameter)
        else:
            parameter.copy_(wide)
        if self.rounding == "compensated":
            self.state[parameter]["compensation"] = (wide.data - parameter).bfloat16()
        wide.data = wide.data.new_empty(0)

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
