"""Tasks: what a model's output is judged by.

A task gives the loss to descend and the metric to report, both as *sums over a batch*, with the weight (the number of
samples, or of tokens) that turns sums into means. Sums of batches of any size then add up to the right mean, which
gradient accumulation and a short last batch would otherwise get wrong.

Label smoothing belongs to what is descended: :func:`judging` gives the task without it, which every evaluation takes.

A user's own task is an object with the attributes of :class:`Task`, or a factory that returns one. What it raises, and
what it returns that is no sum with its weight, is told as its own.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from qtool.data.labels import IGNORED
from qtool.errors import OWN, QtoolError, UsageError, kind_of, nearest, one_line, reason_of
from qtool.factories import is_factory, load_factory
from qtool.nested import entries, tensors
from qtool.system.devices import out_of_memory


@runtime_checkable
class Task(Protocol):
    """A loss and metrics.

    ``metric`` names the entry of :meth:`metrics` (or ``"loss"``) that decides which model is better. A task may also
    have ``finish(means) -> means``, to derive what is no mean of samples (an F1 score, a perplexity), and
    ``directions``, a mapping from its other metrics to whether more is better; see :func:`is_higher_better`.
    """

    @property
    def name(self) -> str:
        """What results call the task."""

    @property
    def metric(self) -> str:
        """The metric that decides."""

    @property
    def higher_is_better(self) -> bool:
        """Whether more of ``metric`` is better."""

    def loss(self, output: Any, target: Any) -> tuple[Tensor, Tensor | float]:
        """(sum of the losses, weight): a scalar with a gradient, and the number of samples or tokens it sums.

        The weight is a number, or a scalar tensor on the target's device. It divides the metrics too, so that class
        weights belong to the losses alone.
        """

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor | float]:
        """Sums over the batch, by name; the weight of :meth:`loss` divides them."""


@dataclass(frozen=True)
class Classification:
    """One class per sample: cross-entropy in nats; ``top1``, and ``top5`` where there are more than five classes.

    Outputs are N×C logits, or hold them as ``logits``, a key or a field (transformers' do), targets N class indices. A
    target of −100 is not counted. A tie counts as right only if the class comes first.
    """

    label_smoothing: float = 0.0
    name: str = "classification"
    metric: str = "top1"
    higher_is_better: bool = True

    def loss(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy of the softmax, with ``label_smoothing`` spread over all classes; samples counted."""
        output, target = _checked(output, target)
        if output.device.type != "cpu" and not torch.is_grad_enabled():  # which waits for the sums anyway
            _require_classes(output, target)
        try:
            losses = F.cross_entropy(output.float(), target, reduction="sum", label_smoothing=self.label_smoothing)
        except IndexError:
            _require_classes(output, target)
            raise
        return losses, (target != IGNORED).sum()

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor | float]:
        """How many of the batch are right, at first and among the first five."""
        output, target = _checked(output, target)
        sums: dict[str, Tensor | float] = {"top1": (output.argmax(1) == target).sum()}
        if output.shape[1] > 5:
            sums["top5"] = (output.topk(5, dim=1).indices == target[:, None]).sum()
        return sums


def _logits(output: Any) -> Any:
    return dict(entries(output)).get("logits", output)


def _checked(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    _require_targets("classification", target)
    output = _logits(output)
    if not isinstance(output, Tensor) or output.ndim != 2 or target.shape != output.shape[:1]:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        tokens = isinstance(output, Tensor) and output.ndim == 3 and target.ndim == 2
        task = "a task of your own, --task FILE.py:factory"
        if tokens:  # or a mapping's part is a list of batches, each of which was taken for a sample
            task = "--task language-modelling for tokens, or single samples where each of these is a batch"
        raise QtoolError(
            "task 'classification'", "N×classes logits and N class indices",
            f"output {got}, target {tuple(target.shape)}", f"correct the model's output, or pass {task}",
        )  # fmt: skip
    if target.is_floating_point():
        got = str(target.dtype).removeprefix("torch.")
        do = "return target.long(), or pass a task of your own, --task FILE.py:factory"
        raise QtoolError("task 'classification'", "class indices (int64)", f"targets of {got}", do)
    return output, target.long()


def _require_classes(output: Tensor, target: Tensor) -> None:
    """Raises QtoolError for a target that is no class. A GPU computes with it, and after that not at all."""
    classes = output.shape[1]
    wrong = ((target != IGNORED) & ((target < 0) | (target >= classes))).nonzero().flatten().tolist()
    if wrong:
        raise QtoolError(
            "task 'classification'", f"class indices below the model's {classes} outputs",
            f"{int(target[wrong[0]])}, of sample {wrong[0]} of the batch",
            "build the model with as many outputs as the data has classes",
        )  # fmt: skip


def _require_targets(task: str, target: Any) -> None:
    if target is None:
        raise QtoolError(f"task '{task}'", "targets", "inputs alone", "give (input, target), or dicts with 'labels'")


@dataclass(frozen=True)
class LanguageModelling:
    """The next token at every place: cross-entropy in nats per token; ``top1`` of the tokens, and ``perplexity``.

    Outputs are N×T×V logits, or hold them as ``logits``, targets N×T token indices. A target of −100 is not
    counted, so windows weigh as many tokens as they have, and means are over tokens. Perplexity is exp(mean loss).
    """

    label_smoothing: float = 0.0
    name: str = "language-modelling"
    metric: str = "perplexity"
    higher_is_better: bool = False
    directions: ClassVar[Mapping[str, bool]] = {"top1": True}

    def loss(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy over the counted tokens, and their number."""
        output, target = _checked_tokens(output, target)
        logits = output.float().flatten(0, 1)
        losses = F.cross_entropy(logits, target.flatten(), reduction="sum", label_smoothing=self.label_smoothing)
        return losses, (target != IGNORED).sum()

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor | float]:
        """How many counted tokens are right."""
        output, target = _checked_tokens(output, target)
        return {"top1": (output.argmax(-1) == target).sum()}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity."""
        return means | {"perplexity": _exp(means["loss"])}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _checked_tokens(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    _require_targets("language-modelling", target)
    output = _logits(output)
    if not isinstance(output, Tensor) or output.ndim != 3 or target.shape != output.shape[:2]:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise QtoolError(
            "task 'language-modelling'", "N×T×vocabulary logits and N×T token indices",
            f"output {got}, target {tuple(target.shape)}", "use a language model with --data text:FILE",
        )  # fmt: skip
    return output, target.long()


BUILT_INS: dict[str, Callable[[float], Task]] = {
    "classification": Classification,
    "language-modelling": LanguageModelling,
}


def load_task(spec: str, *, label_smoothing: float = 0.0) -> Task:
    """The task that ``spec`` names: a built-in one, or a factory's. ``label_smoothing`` is for the former.

    Raises UsageError where the spec is not understood, QtoolError where a factory raises or returns no task.
    """
    if spec in BUILT_INS:
        return BUILT_INS[spec](label_smoothing)
    if not is_factory(spec):
        raise UsageError(
            f"task '{spec}'", "a task", "none of that name", nearest(spec, [*BUILT_INS, "FILE.py:factory"])
        )
    return require_task(load_factory(spec)(), f"task '{spec}'")


def require_task(task: Any, where: str) -> Task:
    """``task`` itself, or one of a class. Raises QtoolError naming attributes that are missing or wrong."""
    if isinstance(task, type):
        try:
            task = task()
        except OWN as error:
            got = f"the class {task.__name__}: {reason_of(error)}"
            raise QtoolError(where, "a task", got, "pass an object of the class") from error
    missing = [name for name in ("name", "metric", "higher_is_better", "loss", "metrics") if not hasattr(task, name)]
    if missing or not isinstance(task, Task):
        got = f"{kind_of(task)} with no {', '.join(missing)}"
        raise QtoolError(
            where, "an object with a task's attributes", got, "add them: help(qtool.tasks.Task) tells each"
        )
    if not isinstance(more := task.higher_is_better, bool):
        raise QtoolError(where, "a 'higher_is_better' that is True or False", repr(more), "correct it")
    return task


def judging(task: Task) -> Task:
    """``task`` as a model is judged by it: without label smoothing, which hides how likely the targets are."""
    if isinstance(task, Classification | LanguageModelling) and task.label_smoothing:
        return replace(task, label_smoothing=0.0)
    return task


def loss_of(task: Task, output: Any, target: Any) -> tuple[Tensor, Tensor | float]:
    """The task's loss of a batch and its weight. Raises QtoolError where it raises, or gives something else.

    Where it has no gradient because the output has none, the model is named and not the task.
    """
    with _told(task, "a loss"):
        found = task.loss(output, target)
    if not (_is_pair(found) and all(map(_is_number, found))):
        raise _no_loss(task, f"a pair of {' and '.join(map(_shape, found))}" if _is_pair(found) else _shape(found))
    loss, weight = found
    if torch.is_grad_enabled() and not (isinstance(loss, Tensor) and loss.requires_grad):
        if not any(tensor.requires_grad for tensor in tensors(output)):
            raise QtoolError(
                "model", "outputs that depend on what is trained", "outputs without a gradient",
                "train what the model calls (of --lora, name other layers with --lora-targets), and have it compute "
                "without torch.no_grad() and detach()",
            )  # fmt: skip
        raise _no_loss(task, "one without a gradient")
    return _scalar(loss), _scalar(weight)


def weight_of(task: Task, weight: Tensor | float) -> float:
    """A batch's weight as a number, once a GPU has it. Raises QtoolError for one that is no count."""
    found = float(weight)
    if not 0 <= found < math.inf:
        raise _no_loss(task, f"a weight of {found:g}")
    return found


def metrics_of(task: Task, output: Any, target: Any) -> Mapping[str, Tensor | float]:
    """The task's sums over a batch. Raises QtoolError where it raises, or gives something else."""
    with _told(task, "metrics"):
        found = task.metrics(output, target)
    if not isinstance(found, Mapping):
        raise _no_metrics(task, _shape(found))
    for name, value in found.items():
        if not _is_number(value):
            raise _no_metrics(task, f"'{name}', {_shape(value)}")
    return found


def is_higher_better(task: Task, metric: str) -> bool | None:
    """Whether more of ``metric`` is better.

    The task says so of the metric that decides, and of others in its ``directions``. Less loss is better, and more of
    anything else where more of the metric that decides is; otherwise it is not known.
    """
    known = {"loss": False, **getattr(task, "directions", {}), task.metric: task.higher_is_better}
    return known.get(metric, True if task.higher_is_better else None)


def require_own_metric(task: Task, names: Collection[str]) -> None:
    """Raises UsageError where the metric that decides is not among ``names``, the metrics that the task gives."""
    if task.metric not in names:
        where, got = f"task '{task.name}'", repr(task.metric)
        raise UsageError(where, "a 'metric' that it gives", got, nearest(str(task.metric), sorted(names)))


def finished(task: Task, means: dict[str, float]) -> dict[str, float]:
    """The task's metrics once its sums are ``means``: what its ``finish`` makes of them, where it has one.

    Raises QtoolError where that raises, or gives something else.
    """
    finish = getattr(task, "finish", None)
    if finish is None:
        return means
    with _told(task, "metrics by 'finish'", "the means of its sums"):
        found = finish(means)
    if not isinstance(found, Mapping) or not all(map(_is_number, found.values())):
        raise _no_metrics(task, f"{_shape(found)} from 'finish'", "names and one number each", "{**means, 'f1': f1}")
    return {str(name): float(value) for name, value in found.items()}


def is_undefined(error: QtoolError) -> bool:
    """Whether a task's ``finish`` cannot compute with what it was given: 0/0 of few samples, say."""
    return isinstance(error.__cause__, ArithmeticError | ValueError)


@contextmanager
def _told(task: Task, what: str, given: str = "the model's output and the target") -> Iterator[None]:
    try:
        yield
    except OWN as error:
        if out_of_memory(error):
            raise
        raise QtoolError(
            f"task '{task.name}'", f"{what} of {given}",
            f"{type(error).__name__}: {one_line(error)}",
            "correct the task, or the output or target that it is given; --debug shows where it failed",
        ) from error  # fmt: skip


def _no_loss(task: Task, got: str) -> QtoolError:
    return QtoolError(
        f"task '{task.name}'", "a loss: its sum over the batch, with a gradient, and how many samples or tokens", got,
        "return for example F.mse_loss(output, target, reduction='sum'), float(len(target))",
    )  # fmt: skip


def _no_metrics(
    task: Task, got: str, expected: str = "names and their sums over the batch, one number each",
    example: str = "{'top1': (output.argmax(1) == target).sum()}, or {}",
) -> QtoolError:  # fmt: skip
    return QtoolError(f"task '{task.name}'", f"metrics: {expected}", got, f"return for example {example}")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)


def _scalar(value: Any) -> Any:
    """A number as it is, and one that is a tensor without dimensions: gradients of any shape can be scaled by it."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
