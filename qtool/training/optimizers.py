"""Optimizers: what each costs per parameter, and how it is made.

===============  ======================  ===============================================================
optimizer        state bytes/parameter   source
===============  ======================  ===============================================================
adamw            8                       arXiv 1711.05101; torch; fused, foreach or a loop
sgd              4 (0 without momentum)  Nesterov momentum; torch, the same
adafactor        0 + rows and columns    arXiv 1804.04235: factored second moment, no first; torch
adamw8bit        2                       arXiv 2110.02861: block-wise 8-bit moments; bitsandbytes
paged-adamw      8, paged to the host    CUDA unified memory, moved out under pressure; bitsandbytes
paged-adamw8bit  2, paged to the host    both; bitsandbytes
lion8bit         1                       arXiv 2302.06675: the sign of one 8-bit moment; bitsandbytes
torchao-adamw8bit  2                     the same as adamw8bit; torchao, compiled for each shape of weight
===============  ======================  ===============================================================

State bytes are for float32 weights; torch's optimizers keep their moments in the dtype of the weights.
Tensors of fewer than 4,096 values keep 32-bit moments in bitsandbytes' 8-bit optimizers. Lion's updates
have the size of its learning rate whatever the gradient: ask for a third to a tenth of AdamW's rate.
bitsandbytes is imported when one of its optimizers is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from qtool.checkpoint import register_tensor_class
from qtool.recipe import TrainConfig
from qtool.step import Setup, plain_optimizer
from qtool.training.block_states import SMALLEST
from qtool.training.blockwise import on_cpu
from qtool.training.compiling import require_compiler

Make = Callable[[list[nn.Parameter]], Optimizer]
SMALLEST_PAGED = 100_000
"""Values from which on bitsandbytes pages a moment."""


def apply(setup: Setup, example: Any) -> None:
    """Has the setup make the optimizer that the config names."""
    setup.make_optimizer = OPTIMIZERS[setup.config.optimizer](setup.config)


def adafactor(config: TrainConfig) -> Make:
    """Adafactor at the schedule's learning rate, relative to each tensor's own size as the paper has it."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Adafactor(parameters, config.learning_rate, weight_decay=config.weight_decay)

    return make


def bitsandbytes(name: str) -> Callable[[TrainConfig], Make]:
    """The optimizer of that class name in bitsandbytes, with its own defaults beside rate and decay."""

    def configured(config: TrainConfig) -> Make:
        def make(parameters: list[nn.Parameter]) -> Optimizer:
            import bitsandbytes.optim

            kind = getattr(bitsandbytes.optim, name)
            if name.startswith("Paged"):
                kind = _repaging(kind)
            if name in ("AdamW8bit", "Lion8bit"):
                kind = on_cpu(kind)
            made: Optimizer = _queued(kind)(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
            for parameter in parameters:
                made.make_state(parameter)  # type: ignore[attr-defined]
            return made

        return make

    return configured


def _queued(kind: Any) -> Any:
    """bitsandbytes waits for the GPU after each parameter. On one stream nothing has to, but where states are paged.

    AdamW's small parameters, more than half of a transformer's, are updated together by torch's kernel: what they cost
    on a GPU is launches.
    """

    class Queued(kind):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if not self.initialized:  # type: ignore[has-type]
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for place, group in enumerate(self.param_groups):
                small: dict[int, list[nn.Parameter]] = {}
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, place, index)
                    if self._is_small(parameter):
                        small.setdefault(self.state[parameter]["step"], []).append(parameter)
                    else:
                        self.prefetch_state(parameter)
                        self.update_step(group, parameter, place, index)
                for count, parameters in small.items():
                    self._update_together(group, parameters, count + 1)
            if self.is_paged and torch.cuda.is_available():
                torch.cuda.synchronize()

        def _is_small(self, parameter: nn.Parameter) -> bool:
            float32 = parameter.dtype == torch.float32  # as torch's kernel wants it beside such moments
            return bool(self.optimizer_name == "adam" and float32 and parameter.numel() < SMALLEST)

        def _update_together(self, group: Any, parameters: list[nn.Parameter], step: int) -> None:
            states = [self.state[parameter] for parameter in parameters]
            for state in states:
                state["step"] = step
            count = torch.full((), float(step), device=parameters[0].device)
            torch._fused_adamw_(
                [*parameters], [p.grad for p in parameters if p.grad is not None],
                [state["state1"] for state in states], [state["state2"] for state in states], [],
                [count] * len(states), lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip

        def make_state(self, parameter: nn.Parameter) -> None:
            """Makes the states of a parameter that has values: later, they would lie scattered among activations."""
            group = self.param_groups[0]
            if parameter.numel():
                self.init_state(group, parameter, 0, next(i for i, p in enumerate(group["params"]) if p is parameter))

    return Queued


def _repaging(kind: Any) -> Any:
    """bitsandbytes loads paged moments as ordinary tensors on the GPU; this puts them back into paged memory.

    Those of fake parameters, of which no memory is taken, are fake too, and outside of the GPU's.
    """

    class Repaging(kind):  # type: ignore[misc]
        def get_state_buffer(self, p: Any, dtype: torch.dtype = torch.float32) -> Any:
            if not isinstance(p, FakeTensor) or p.numel() < SMALLEST_PAGED:
                return super().get_state_buffer(p, dtype)
            state = torch.zeros(p.shape, dtype=dtype, device="cpu")
            state.is_paged = True  # type: ignore[attr-defined]
            return state

        def prefetch_state(self, p: Any) -> None:
            if not isinstance(p, FakeTensor):
                super().prefetch_state(p)

        def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
            super().load_state_dict(state_dict, move_to_device)
            for parameter, state in self.state.items():
                for key in {"state1", "state2"} & state.keys():
                    moment = state[key]
                    state[key] = self.get_state_buffer(parameter, dtype=moment.dtype)
                    state[key].copy_(moment)

    return Repaging


def torchao(config: TrainConfig) -> Make:
    """torchao's 8-bit AdamW. Raises QtoolError where the compiler that its step needs is not there."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        require_compiler(parameters[0].device.type, "--optimizer torchao-adamw8bit")
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit

        register_tensor_class(OptimState8bit)
        made: Optimizer = _with_plain_rate(AdamW8bit)(
            parameters, config.learning_rate, weight_decay=config.weight_decay
        )
        return made

    return make


def _with_plain_rate(kind: Any) -> Any:
    """torchao wants its learning rate in one tensor, so as not to be compiled anew for each; here it is a number."""

    class Plain(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            rate = group["lr"]
            group["lr"] = torch.tensor(float(rate), dtype=torch.float32)
            super().step(closure)
            group["lr"] = rate

    return Plain


OPTIMIZERS: dict[str, Callable[[TrainConfig], Make]] = {
    "adamw": plain_optimizer,
    "sgd": plain_optimizer,
    "adafactor": adafactor,
    "adamw8bit": bitsandbytes("AdamW8bit"),
    "paged-adamw": bitsandbytes("PagedAdamW32bit"),
    "paged-adamw8bit": bitsandbytes("PagedAdamW8bit"),
    "lion8bit": bitsandbytes("Lion8bit"),
    "torchao-adamw8bit": torchao,
}
