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

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from qtool.errors import QtoolError
from qtool.recipe import TrainConfig
from qtool.steps.setup import Setup, plain_optimizer
from qtool.steps.trees import register_tensor_class
from qtool.system import processes
from qtool.system.devices import resolve_device
from qtool.system.imports import imported
from qtool.training.batched import batched, paged_when_fake
from qtool.training.blockwise import on_cpu
from qtool.training.compiling import require_compiler
from qtool.training.lora_layers import trained_in_full
from qtool.training.precision import weight_dtype

Make = Callable[[list[nn.Parameter]], Optimizer]


def apply(setup: Setup, example: Any) -> None:
    """Has the setup make the optimizer that the config names."""
    setup.make_optimizer = OPTIMIZERS[setup.config.optimizer](setup.config)


def require(model: nn.Module, config: TrainConfig) -> None:
    """Raises QtoolError where the optimizer cannot update the model, or has not the compiler that it needs."""
    if config.optimizer == "torchao-adamw8bit":
        require_compiler(resolve_device(config.device).type, "--optimizer torchao-adamw8bit")
    _require_real(model, config)
    _require_narrow(model, config)
    for name, module in _trained(model, config):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise QtoolError(
                "--optimizer", "gradients of whole weights", f"'{name}', an embedding with sparse ones",
                "build it with sparse=False",
            )  # fmt: skip


def _require_real(model: nn.Module, config: TrainConfig) -> None:
    """Raises QtoolError for complex parameters, but of torch's AdamW and SGD without fused kernels or loss scaling."""
    plain = config.optimizer in ("adamw", "sgd")
    if not plain:
        where, do = "--optimizer", "pass --optimizer adamw --optimizer-kernels foreach"
    elif config.optimizer_kernels == "fused":
        where, do = "--optimizer-kernels", "pass --optimizer-kernels foreach"
    elif config.precision == "16-mixed":
        where, do = "--precision", "pass --precision bf16-mixed, whose gradients are not scaled"
    else:
        return
    for place, module in _trained(model, config):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_complex():
                got = f"'{f'{place}.{name}'.strip('.')}' of {parameter.dtype}"
                raise QtoolError(where, "real parameters", got, do)


def _require_narrow(model: nn.Module, config: TrainConfig) -> None:
    """Raises QtoolError for parameters of float64 where bitsandbytes, which has no kernels for them, updates them."""
    theirs = config.optimizer.startswith(("paged", "adamw8bit", "lion8bit"))
    if not theirs or weight_dtype(config.precision) is not None:
        return
    for place, module in _trained(model, config):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.dtype == torch.float64:
                raise QtoolError(
                    "--optimizer", "weights of 32 bits or fewer", f"'{f'{place}.{name}'.strip('.')}' of float64",
                    "pass --optimizer adamw, or convert the model with .float()",
                )  # fmt: skip


def _trained(model: nn.Module, config: TrainConfig) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are not frozen, by name: with adapters those that are trained in full beside them."""
    full = tuple(f"{name}." for name in trained_in_full(model, config.lora_trained))
    return ((n, m) for n, m in model.named_modules() if config.lora is None or f"{n}.".startswith(full))


def adafactor(config: TrainConfig) -> Make:
    """Adafactor at the schedule's learning rate, relative to each tensor's own size as the paper has it."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Adafactor(parameters, config.learning_rate, weight_decay=config.weight_decay)

    return make


def bitsandbytes(name: str) -> Callable[[TrainConfig], Make]:
    """The optimizer of that class name in bitsandbytes, with its own defaults beside rate and decay."""

    def configured(config: TrainConfig) -> Make:
        def make(parameters: list[nn.Parameter]) -> Optimizer:
            kind = getattr(imported("bitsandbytes.optim", "--optimizer", "bitsandbytes"), name)
            if name.startswith("Paged"):
                kind = paged_when_fake(kind)
            if name in ("AdamW8bit", "Lion8bit"):
                kind = on_cpu(kind)
            made: Optimizer = batched(kind)(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
            for parameter in parameters:
                made.make_state(parameter)  # type: ignore[attr-defined]
            return made

        return make

    return configured


def torchao(config: TrainConfig) -> Make:
    """torchao's 8-bit AdamW."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit

        register_tensor_class(OptimState8bit)
        made: Optimizer = _with_plain_rate(AdamW8bit)(
            parameters, config.learning_rate, weight_decay=config.weight_decay
        )
        return made

    return make


def _with_plain_rate(kind: Any) -> Any:
    """torchao wants its learning rate in one tensor, so as not to be compiled anew for each; here it is a number.

    Fake parameters are not updated: what that takes is allocated, their states, and both moments of each weight in turn
    in float32, which the compiled update has side by side.
    """

    class Plain(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            group = self.param_groups[0]
            if isinstance(processes.local(group["params"][0]), FakeTensor):
                self._allocate(group["params"])
                return
            rate = group["lr"]
            group["lr"] = torch.tensor(float(rate), dtype=torch.float32)
            super().step(closure)
            group["lr"] = rate

        def _allocate(self, parameters: list[nn.Parameter]) -> None:
            for parameter in parameters:
                if parameter.grad is None:
                    continue
                moments = {"exp_avg": True, "exp_avg_sq": False}
                if not self.state[parameter]:
                    made = {name: self._new_buffer(parameter, signed) for name, signed in moments.items()}
                    self.state[parameter] = {"step": torch.tensor(0.0)} | made
                states = [processes.local(self.state[parameter][name]) for name in moments]
                coded = [state for state in states if hasattr(state, "codes")]
                taken = [torch.empty_like(state.codes, dtype=torch.float32) for state in coded]
                del taken

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
