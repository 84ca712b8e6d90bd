"""One optimizer step, and what it is made of.

The step is the textbook one::

    for each micro-batch:  loss = sum of losses / number of samples (or tokens) in the whole batch
                           scale(loss).backward()
    unscale, clip, optimizer.step(), update the scale

A :class:`Setup` holds its parts: the model, how an optimizer is made, the contexts around the forward
pass, the gradient scaler. :func:`plain` is full precision with AdamW or SGD; each technique in
``qtool.training`` changes one or two fields of a Setup before the first step, and the step itself never
asks which techniques are on.

Averaging. A loss function returns (sum, weight): the sum over samples or tokens, and their number. The
mean over a batch in micro-batches is Σ sums / Σ weights, and not the mean of the micro-batches' means,
which is wrong as soon as they differ in size. Σ weights is known only after the last micro-batch, so the
backward passes divide by a guess (the first micro-batch's weight per sample, times the samples), and the
gradients are corrected by guess / Σ weights at the end; for a loss that counts samples the two are equal.
A micro-batch's batch-norm statistics are its own: with batch-norm, accumulation is not the large batch.

Several processes (``qtool.system.processes``) each take their share of the batch. Gradients come out of the
backward pass averaged over the processes, and so each divides its sum by Σ weights / processes, with the
sum over all of them. All make the same number of passes, since they exchange parameters or gradients in
each: one whose samples have run out repeats one of them, and multiplies its loss by zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from qtool.errors import FAILED_COMPILERS, QtoolError, UsageError
from qtool.forward import passes_told
from qtool.nested import call, map_tensors, no_floats, num_samples, split, to_float32
from qtool.recipe import TrainConfig
from qtool.steps import moved_buffers, unreached
from qtool.steps.checkpoint import Files
from qtool.steps.unreached import Tell
from qtool.system import processes
from qtool.system.devices import load_inductor, resolve_device

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
STAGED = 64 * 2**10
"""Bytes that CUDA takes from pageable memory before a copy returns, whatever the GPU is at."""
LossFunction = Callable[[Callable[[Any], Any], Any, Any], tuple[Tensor, "Tensor | float"]]
"""(model, input, target) -> (sum of the loss over samples or tokens, their number)."""


def compiled(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """``function``, a forward pass of ``module``, compiled. What predicts a step puts its own in this one's place."""
    load_inductor()
    return torch.compile(function, options=moved_buffers.options())


def take_place(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Has ``module`` run ``forward``; what that returns gives back what it ran, its class's or one of its own."""
    before = {key: value for key, value in vars(module).items() if key == "forward"}
    module.forward = forward

    def give_back() -> None:
        vars(module).pop("forward", None)
        vars(module).update(before)

    return give_back


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
def _backward_told() -> Iterator[None]:
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


def micro_size(config: TrainConfig, halvings: int = 0, batch_size: int | None = None) -> int:
    """Samples of a process's micro-batch, that many times halved; of batches of another size than the config's."""
    size = math.ceil(math.ceil((batch_size or config.batch_size) / processes.size()) / config.micro_batches)
    return -(-size // (1 << halvings))


def fewest_samples(model: nn.Module) -> int:
    """How many a micro-batch that nobody asked for has at least: batch-norm may not train on one value per channel."""
    return 2 if any(map(_is_batch_norm, model.modules())) else 1


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether it is a batch-norm, or a captured graph with one in it."""
    if isinstance(module, GraphModule):
        return any(node.target is torch.ops.aten.batch_norm.default for node in module.graph.nodes)
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


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


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """The rate of ``step`` (0 … total-1): a linear warm-up, then constant or half a cosine down to zero.

    Step s of w warm-up steps has (s+1)/w of the peak; of the n-w steps after them, step k has
    (1 + cos(πk/(n-w)))/2 of it (arXiv 1608.03983, without restarts).
    """
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class NotFinite(Exception):
    """The loss of a step, ``value``, was NaN or infinite. ``forward`` repeats the forward pass that made it."""

    def __init__(self, value: float, forward: Callable[[], Any]) -> None:
        super().__init__(f"loss {value}")
        self.value, self.forward = value, forward


@dataclass(frozen=True)
class Part:
    """A micro-batch; one that does not count stands in for samples that this process does not have."""

    value: Any
    target: Any
    counts: bool = True

    @property
    def samples(self) -> int:
        return num_samples(self.value) if self.counts else 0


class Step:
    """Makes optimizer steps: ``Step(setup, optimizer, loss)(input, target)`` returns the batch's mean loss."""

    def __init__(self, setup: Setup, optimizer: Optimizer, loss: LossFunction) -> None:
        self.setup, self.optimizer, self.loss = setup, optimizer, loss
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.micro_size = micro_size(setup.config)
        self.fewest = fewest_samples(setup.model)
        self.skips: Tensor | int = 0
        self.updating = False
        """Whether parameters may have changed in the step that is being made."""

    @property
    def skipped(self) -> int:
        """Steps that the gradient scaler has skipped. To read it waits for a GPU."""
        return int(self.skips)

    def halve(self) -> bool:
        """Makes micro-batches half as large, from the next step on; False where they are as small as they can be."""
        if self.setup.updates_in_backward:
            return False
        before = self.micro_size
        self.micro_size = min(before, max(self.fewest, math.ceil(before / 2)))
        return self.micro_size < before

    def __call__(self, value: Any, target: Any, rate: float, total: int | None = None) -> float:
        """One step at learning rate ``rate``. Raises NotFinite, with the parameters untouched, for such a loss.

        ``total`` is the batch's size over all processes, where ``value`` is this one's share of it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self._parts(value, target, num_samples(value) if total is None else total)
        self.updating = self.setup.updates_in_backward
        mean = self._backward(parts)()
        self._require_finite(mean, parts)
        self.updating = True
        self._update()
        return mean

    def _parts(self, value: Any, target: Any, total: int) -> list[Part]:
        """The micro-batches: as many as the process with the largest share has.

        One of a single sample, which batch-norm may not take, is made only where that is the size of all. Where updates
        are made in the backward pass the batch is whole, also the one that a left-over sample has joined.
        """
        if self.setup.updates_in_backward:
            return [Part(value, target)]
        share = processes.share(total)
        wanted = self._num_parts(share.largest)
        count = min(wanted, max(1, share.count))
        parts = [Part(x, y, share.count > 0) for x, y in split((value, target), count)]
        return parts + [replace(parts[0], counts=False)] * (wanted - count)

    def _num_parts(self, largest: int) -> int:
        """The micro-batches of each process in a batch of which none has more than ``largest`` samples."""
        least = min(self.fewest, self.micro_size)
        return min(math.ceil(largest / self.micro_size), max(1, largest // least))

    def smallest(self, total: int) -> int:
        """The samples of the smallest micro-batch that any process makes of a batch of ``total``."""
        least = max(1, total // processes.size())
        if self.setup.updates_in_backward:
            return least
        return least // min(self._num_parts(-(-total // processes.size())), least)

    def _forward(self, part: Part) -> tuple[Tensor, Tensor | float]:
        setup = self.setup
        with setup.forward():
            given = setup.place(part.value), setup.move(part.target)
            loss, weight = setup.replica(self.loss, *given) if setup.replica else self.loss(setup.model, *given)
        return (loss, weight) if part.counts else (loss * 0.0, weight * 0)  # of one dtype in all processes

    def _losses(self, parts: list[Part]) -> list[Any]:
        return [self._forward(part) for part in parts]

    def _backward(self, parts: list[Part]) -> Callable[[], float]:
        """Leaves the batch's gradients in the parameters; what it returns reads the mean loss."""
        self.optimizer.zero_grad()
        sums: list[Tensor] = []
        weights: list[Tensor | float] = []
        guess: Tensor | float = 1.0
        for part in parts:
            last = len(sums) + 1 == len(parts)
            with nullcontext() if last else self.setup.accumulating():
                loss, weight = self._forward(part)
                if not sums:
                    guess = _guess(weight, parts)
                sums.append(loss.detach())
                weights.append(weight)
                scaled = self.setup.scaler.scale(loss / guess)
                del loss
                if last:
                    alone = len(parts) == 1 and processes.size() == 1  # then the guess was none
                    whole = guess if alone else _at_least(processes.total(sum(weights)), 1.0)
                    reading = _reader((sums[0] if alone else processes.total(sum(sums))) / whole)
                    if self.setup.updates_in_backward:
                        self._require_finite(reading(), parts)
                # in this thread: autograd's own would have a second workspace of cuBLAS, 32 MiB on an H100
                with torch.autograd.set_multithreading_enabled(False), _backward_told():
                    scaled.backward()  # type: ignore[no-untyped-call]
        if len(parts) > 1:
            self._correct(guess / (whole / processes.size()))
        return reading

    def _require_finite(self, mean: float, parts: list[Part]) -> None:
        if not math.isfinite(mean):
            raise NotFinite(mean, lambda: self._losses(parts))

    def _correct(self, factor: Tensor | float) -> None:
        if isinstance(factor, Tensor) or factor != 1.0:
            grads = [processes.local(p.grad) for p in self.parameters if p.grad is not None]
            if isinstance(factor, Tensor) and grads:
                factor = factor.to(grads[0].device)  # which are in host memory where weights are offloaded
            torch._foreach_mul_(grads, factor)

    def _update(self) -> None:
        scaler, clip = self.setup.scaler, self.setup.config.grad_clip
        scale = scaler._scale.clone() if scaler.is_enabled() else None  # type: ignore[union-attr]
        if clip is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, clip)
        scaler.step(self.optimizer)
        scaler.update()
        if scale is not None:  # compared where it is: to ask for its value would wait for the step
            self.skips = self.skips + (scaler._scale < scale)  # type: ignore[operator]


def _at_least(weight: Tensor | float, low: float) -> Tensor | float:
    """``weight``, and ``low`` where it is zero: a batch without a single counted token has a loss of zero."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, low)
    return weight if weight > 0 else low


def _guess(weight: Tensor | float, parts: list[Part]) -> Tensor | float:
    """A process's mean weight in this batch, as the first micro-batches make it seem; of a single one it is exact."""
    weight, count = processes.total(weight), processes.size()
    if len(parts) == 1:
        return _at_least(weight, 1.0) / count if count > 1 else _at_least(weight, 1.0)
    first, samples = processes.total(parts[0].samples), processes.total(sum(part.samples for part in parts))
    guess: Tensor | float = _at_least(weight, float(first)) / first * samples / count
    return guess


def _reader(mean: Any) -> Callable[[], float]:
    """Reads ``mean`` later, without waiting for a GPU's backward pass, which is queued after this call."""
    if not isinstance(mean, Tensor):
        return lambda: float(mean)
    if mean.device.type != "cuda":
        return mean.item
    host = torch.empty((), dtype=torch.float32, pin_memory=True)
    host.copy_(mean.reshape(()), non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> float:
        done.synchronize()
        return host.item()

    return read
