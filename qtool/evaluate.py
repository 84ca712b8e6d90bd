"""Evaluation: a model against targets, and one model against another.

``compare`` is what a quantized model is judged by. With reference logits r and other logits o of the same N samples:

* agreement: share of samples with the same argmax.
* kl: mean over samples of KL(p‖q) = Σ p (ln p − ln q), p = softmax(r), q = softmax(o), in nats.
* sqnr_db: 10 log10(Σ r² / Σ (r − o)²), over all logits; infinite where they are equal.
* top1_drop: top-1 of the reference less top-1 of the other, as a share. Only samples that one gets right and the other
  wrong move it, so its interval is that of *paired* proportions: with b samples right only in the reference and c only
  in the other, half a sample is added to each of the four cells (Agresti and Min, "Simple improved confidence intervals
  for comparing matched proportions", Statistics in Medicine 24, 2005), n' = N + 2, b' = b + ½, c' = c + ½, and

      d = (b' − c') / n',    d ± 1.96 sqrt((b' + c') − (b' − c')² / n') / n'

  Unlike the plain normal interval it does not collapse to a point when the two never differ.

Several processes (``qtool.processes``) each evaluate their share of a data set; the sums are of all.

Everything is summed in float64. Left out on purpose: the bootstrap, which says the same here and needs a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from qtool import processes
from qtool.data import batches
from qtool.errors import QtoolError
from qtool.tasks import Task, finished, loss_of, metrics_of
from qtool.text import IGNORED

Predict = Callable[[Any], Any]
Z95 = 1.959963984540054  # the normal distribution's 97.5 % point


@torch.no_grad()
def evaluate(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> dict[str, float]:
    """Means of ``loss`` and of the task's metrics over all batches of all processes, and ``num_samples`` weighed.

    Streams: nothing grows with the number of batches. Raises QtoolError where there is no batch.
    """
    gathered = processes.gather(_sums(predict, batches, task))
    weight = sum(part for part, _ in gathered)
    if not weight:
        raise QtoolError("evaluation", "at least one sample", "none", "pass data with samples in it")
    names = dict.fromkeys(name for _, part in gathered for name in part)
    means = {name: sum(part.get(name, 0.0) for _, part in gathered) / weight for name in names}
    return {"num_samples": weight, **finished(task, means)}


@torch.no_grad()
def metrics_in(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> set[str] | None:
    """The names of the metrics that :func:`evaluate` gives of such batches; the values of a few mean nothing.

    None where nothing in them is weighed, or the task's ``finish`` cannot compute with them, as it may with all.
    """
    weight, sums = _sums(predict, batches, task)
    if not weight:
        return None
    try:
        return set(finished(task, {name: value / weight for name, value in sums.items()}))
    except QtoolError as error:
        if isinstance(error.__cause__, ArithmeticError | ValueError):
            return None
        raise


def _sums(predict: Predict, batches: Iterable[tuple[Any, Any]], task: Task) -> tuple[float, dict[str, float]]:
    """The weight of this process's batches, and the sums of loss and metrics over them."""
    sums: dict[str, Any] = {}
    weight = 0.0
    for inputs, target in batches:
        output = predict(inputs)
        loss, count = loss_of(task, output, target)
        weight += float(count)
        for name, value in {"loss": loss, **metrics_of(task, output, target)}.items():
            sums[name] = sums.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)
    return weight, {name: float(value) for name, value in sums.items()}


def shared_batches(dataset: Any, batch_size: int, predict: Predict) -> Iterator[tuple[Any, Any]]:
    """The batches of this process's share of ``dataset``, for :func:`evaluate`.

    Where another process has one more, ``predict`` is called on a sample in its place and the output dropped: processes
    that hold parts of one model run it together or not at all.
    """
    share = processes.share(len(dataset))
    yield from batches(dataset, batch_size, order=range(share.start, share.stop))
    for _ in range(math.ceil(share.count / batch_size), math.ceil(share.largest / batch_size)):
        predict(next(batches(dataset, 1, order=[0]))[0])


@torch.no_grad()
def predictions(predict: Predict, batches: Iterable[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """All outputs (N×C float32) and all targets (N), on the CPU. Raises QtoolError where there is no batch."""
    outputs, targets = [], []
    for inputs, target in batches:
        outputs.append(torch.as_tensor(predict(inputs)).detach().to("cpu", torch.float32))
        targets.append(torch.as_tensor(target).cpu())
    if not outputs:
        raise QtoolError("evaluation", "at least one sample", "none", "pass data with samples in it")
    return torch.cat(outputs), torch.cat(targets)


def compare(reference: Tensor, other: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
    """How far ``other`` is from ``reference``, two N×C logit tensors of the same samples; with N targets if known.

    Logits of sequences, N×T×C with N×T targets, are compared token by token, those without a target left out.

    Returns ``num_samples``, ``agreement``, ``kl`` (nats), ``sqnr_db`` and, with targets, ``top1``, ``top1_reference``,
    ``top1_drop`` (shares) and ``top1_drop_ci95`` (low, high); the module says how each is defined. Raises QtoolError
    where shapes differ or a logit is not finite.
    """
    if reference.ndim == 3 and reference.shape == other.shape:
        reference, other, targets = _tokens(reference, other, targets)
    reference, other = _checked("reference", reference), _checked("other", other)
    if reference.shape != other.shape:
        got = f"{tuple(reference.shape)} and {tuple(other.shape)}"
        raise QtoolError("comparison", "outputs of the same shape", got, "compare the same samples and classes")
    result: dict[str, Any] = {
        "num_samples": len(reference),
        "agreement": (reference.argmax(1) == other.argmax(1)).double().mean().item(),
        "kl": kl_divergence(reference, other),
        "sqnr_db": sqnr_db(reference, other),
    }
    if targets is not None:
        right, wrong = (scores.argmax(1) == targets for scores in (reference, other))
        result |= _drop(right, wrong)
    return result


def _tokens(reference: Tensor, other: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    reference, other = reference.flatten(0, 1), other.flatten(0, 1)
    if targets is None:
        return reference, other, None
    counted = targets.flatten() != IGNORED
    return reference[counted], other[counted], targets.flatten()[counted]


def _checked(name: str, outputs: Tensor) -> Tensor:
    if outputs.ndim != 2 or not len(outputs):
        raise QtoolError(f"{name} outputs", "N×C logits, N at least 1", str(tuple(outputs.shape)), "pass logits")
    outputs = outputs.double()
    bad = (~outputs.isfinite()).any(1).nonzero()
    if len(bad):
        raise QtoolError(
            f"{name} outputs", "finite logits", f"NaN or infinity in {len(bad)} samples, the first {int(bad[0])}",
            "inspect the model's weights and inputs",
        )  # fmt: skip
    return outputs


def kl_divergence(reference: Tensor, other: Tensor) -> float:
    """Mean KL(softmax(reference) ‖ softmax(other)) over the rows of two N×C logit tensors, in nats, float64."""
    log_p, log_q = reference.double().log_softmax(1), other.double().log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean().item()


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10(Σ reference² / Σ (reference − other)²) in dB, in float64.

    Infinite where the two are equal, −infinite where only the reference is all zero.
    """
    signal = reference.double().square().sum().item()
    noise = (reference.double() - other.double()).square().sum().item()
    return ratio_db(signal, noise)


def ratio_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two energies; infinite where there is no noise, else −infinite without a signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _drop(reference_right: Tensor, other_right: Tensor) -> dict[str, Any]:
    """Top-1 of both, its drop and the drop's 95 % interval, from which samples each got right."""
    only_reference = int((reference_right & ~other_right).sum())
    only_other = int((other_right & ~reference_right).sum())
    return {
        "top1": other_right.double().mean().item(),
        "top1_reference": reference_right.double().mean().item(),
        "top1_drop": (only_reference - only_other) / len(reference_right),
        "top1_drop_ci95": paired_interval(only_reference, only_other, len(reference_right)),
    }


def mean_interval(values: Tensor) -> tuple[float, float]:
    """The 95 % interval of the mean of N independent values; infinitely wide for a single one."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = student95(len(values) - 1) * float(values.std()) / math.sqrt(len(values))
    middle = float(values.mean())
    return middle - half, middle + half


def wilson_interval(count: float, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion: ``count`` of ``total``, as shares."""
    share, z2 = count / total, Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def student95(freedom: int) -> float:
    """The 97.5 % point of Student's t: exact for 1 and 2 degrees of freedom, else by Fisher's series (within 1 %)."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = Z95, float(freedom)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / n**power for power, term in enumerate(terms, 1))


def paired_interval(only_first: int, only_second: int, total: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two paired proportions (Agresti and Min 2005), clipped to −1 … 1.

    Of ``total`` samples, ``only_first`` were right only in the first and ``only_second`` only in the second.
    """
    n, b, c = total + 2, only_first + 0.5, only_second + 0.5
    middle = (b - c) / n
    half = Z95 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    return max(-1.0, middle - half), min(1.0, middle + half)
