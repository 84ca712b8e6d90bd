"""What a step is made of: the model, how an optimizer is made, what surrounds a forward pass, the gradient scaler.

:func:`plain` is full precision with AdamW or SGD; each technique in ``qtool.training`` changes one or two fields of a
:class:`Setup` before the first step, and the step itself (``qtool.steps.step``) never asks which techniques are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from qtool.errors import UsageError
from qtool.nested import map_tensors, to_float32
from qtool.recipe import TrainConfig
from qtool.steps import unreached
from qtool.steps.checkpoint import Files
from qtool.steps.passes import answer
from qtool.steps.unreached import Tell
from qtool.system import processes
from qtool.system.devices import resolve_device

STAGED = 64 * 2**10
"""Bytes that CUDA takes from pageable memory before a copy returns, whatever the GPU is at."""
LossFunction = Callable[[Callable[[Any], Any], Any, Any], tuple[Tensor, "Tensor | float"]]
"""(model, input, target) -> (sum of the loss over samples or tokens, their number)."""


@dataclass
class Setup:
    """The parts of a step. Techniques change the fields; :meth:`close` takes back what they did to the model."""

    model: nn.Module
    config: TrainConfig
    device: torch.device
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    scaler: torch.amp.GradScaler
    around: list[Callable[[], AbstractContextManager[object]]] = field(default_factory=list)
    """Contexts entered around each forward pass and its loss, in order."""
    widths: dict[str, torch.dtype] = field(default_factory=dict)
    """What weights came in, by name, that were cast on their way to the device."""
    exact: dict[str, Tensor] = field(default_factory=dict)
    """Buffers as they came, by name, of which a cast took something away."""
    input_dtype: torch.dtype | None = None
    """What floating-point inputs are cast to, if anything."""
    memory_format: torch.memory_format = torch.contiguous_format
    """How four-dimensional inputs lie in memory."""
    updates_in_backward: bool = False
    """Whether the backward pass itself changes parameters: a loss is then looked at before it."""
    replica: Callable[[LossFunction, Any, Any], tuple[Tensor, Tensor | float]] | None = None
    """What computes a loss in the model's place, where that exchanges gradients with other processes."""
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around all micro-batches but the last."""
    tell_unreached: Tell = unreached.tell
    """What tells of parameters that the first steps have left without a gradient."""
    files: Files = field(default_factory=Files)
    """How a checkpoint lies on disk."""
    on_close: list[Callable[[], object]] = field(default_factory=list)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The surroundings of a forward pass."""
        with ExitStack() as stack:
            for context in self.around:
                stack.enter_context(context())
            yield

    def place(self, value: Any) -> Any:
        """An input on the device, in the dtype and memory format that the model takes."""
        return map_tensors(self._place, value)

    def move(self, value: Any) -> Any:
        """A target on the device, as it is: 1,001 in 16 bits would be 1,000."""
        return map_tensors(self._moved, value)

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self.input_dtype if tensor.is_floating_point() and self.input_dtype else tensor.dtype
        layout = self.memory_format if tensor.dim() == 4 else torch.preserve_format
        return self._moved(tensor).to(dtype, memory_format=layout)

    def _moved(self, tensor: Tensor) -> Tensor:
        """On the device. To a GPU through pinned memory: a copy from any other would wait for the step before.

        A small tensor goes into the command itself, and does not wait.
        """
        if self.device.type != "cuda" or tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return tensor.to(self.device)
        small = tensor.numel() * tensor.element_size() <= STAGED and not tensor.is_pinned()
        return (tensor if small else tensor.pin_memory()).to(self.device, non_blocking=True)

    def predict(self, value: Any) -> Any:
        """The model's output for an input, as float32, without gradients. The model's mode is the caller's."""
        with torch.no_grad(), self.forward():
            return to_float32(answer(self.model, self.place(value)))

    def close(self) -> None:
        """Takes back, last first, what the techniques did to the model. It may be called twice."""
        while self.on_close:
            self.on_close.pop()()

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None and processes.size() > 1:
            self.on_close.clear()  # what puts a model together again would wait for processes that do not come
        self.close()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``model`` that training changes: those with values. Raises UsageError where there are none."""
    found = [p for p in model.parameters() if p.requires_grad and p.numel()]  # adafactor divides by their number
    if not found:
        raise UsageError("training", "a model with parameters to train", "none", "leave some requires_grad on")
    return found


def plain(model: nn.Module, config: TrainConfig, example: Any = None) -> Setup:
    """The step without any technique: full precision, AdamW or SGD. ``model`` is moved to the device.

    Raises UsageError where ``config`` asks for more: ``qtool.training.techniques.setup`` gives that.
    """
    device = resolve_device(config.device)
    for name, value, known in (
        ("precision", config.precision, ("32-true",)),
        ("optimizer", config.optimizer, ("adamw", "sgd")),
    ):
        if value not in known:
            raise UsageError(f"'{name}' of a step without techniques", " or ".join(known), value, "pass a setup")
    return Setup(model.to(device), config, device, plain_optimizer(config), no_scaler(device))


def no_scaler(device: torch.device) -> torch.amp.GradScaler:
    """A gradient scaler that is switched off: it scales by one and skips nothing."""
    return torch.amp.GradScaler(device.type, enabled=False)


def plain_optimizer(config: TrainConfig) -> Callable[[list[nn.Parameter]], Optimizer]:
    """torch's AdamW (arXiv 1711.05101) or SGD with Nesterov momentum, by the kernels that ``config`` names."""
    foreach, fused = config.optimizer_kernels == "foreach", config.optimizer_kernels == "fused"

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        rate, decay = config.learning_rate, config.weight_decay
        if config.optimizer == "sgd":
            momentum = config.momentum
            return torch.optim.SGD(
                parameters, rate, momentum=momentum, weight_decay=decay, nesterov=momentum > 0, foreach=foreach,
                fused=fused,
            )  # fmt: skip
        return torch.optim.AdamW(parameters, rate, weight_decay=decay, foreach=foreach, fused=fused)

    return make
