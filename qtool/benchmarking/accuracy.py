"""How well each variant's file does on labelled data, and how far it is from the reference file.

Every batch goes through all the files before the next is read, so the data is read once and is never
held; what is kept are the values of the first output, N × C for each variant. Files
with a fixed batch size, and runtimes that compile for each size anew, are fed whole batches, the last one
padded and its padding dropped.

Samples are counted by the axis of an output that the inputs' samples are on, mostly the first. An output without one
(of a file whose input is one image and no batch, say) is one sample's.

Batches may hold sequences of other lengths than the ones before them; what a shorter one does not have is compared
with nothing.

A task's own metrics (a perplexity, an F1 score, a mean error) are the task's to compute (:class:`Scores`), from all
outputs of each file, put together as the model gives them, and how far the metric that decides is from the reference's
with an interval (``paired.py``) where the task judges samples alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from qtool import evaluate, paired
from qtool.benchmarking.inputs import Layout, to_feeds
from qtool.data.labels import IGNORED
from qtool.errors import QtoolError, QtoolWarning
from qtool.nested import cut, from_arrays, packed, tensors
from qtool.runtimes.base import Array, Session
from qtool.tasks import Task

Compare = Callable[[torch.Tensor, torch.Tensor, Any], dict[str, Any]]


class Scores:
    """Each variant's loss and metrics by a task, added up as the batches come.

    ``structure`` is what the model's outputs are packed in, any tensors in the places of its own; without it, and of a
    file with another number of outputs, a single output is taken as it is, and several as a tuple. Where the task
    cannot judge them nothing more is added, and ``failure`` says why. ``apart`` says why the metric that decides has no
    interval, where that is the task's doing.
    """

    def __init__(self, task: Task, structure: Any = None) -> None:
        self.task, self.structure, self.failure, self.apart = task, structure, "", ""
        self._unknown = False
        self._sums: dict[str, evaluate.Sums] = {}
        self._alone: dict[str, list[tuple[paired.Sums, torch.Tensor]]] | None = {}

    def add(self, name: str, outputs: list[Array], target: Any) -> None:
        """Adds what one variant gave for a batch."""
        if self.failure:
            return
        try:
            output = self._packed(outputs)
            self._sums.setdefault(name, evaluate.Sums(self.task)).add(output, target)
            self._unknown = self._unknown or any(value.isnan().any() for value in tensors(target))
        except QtoolError as error:
            self.failure = str(error)
        else:
            self._add_samples(name, output, target)

    def _add_samples(self, name: str, output: Any, target: Any) -> None:
        """Each sample's sums, of which intervals are made; no more of them where the task takes whole batches alone."""
        if self._alone is None:
            return
        try:
            self._alone.setdefault(name, []).append(paired.sums_of(self.task, output, target))
        except (QtoolError, ValueError):
            self._alone = None

    def _packed(self, outputs: list[Array]) -> Any:
        values = [torch.from_numpy(value) for value in outputs]
        values = [value.float() if value.is_floating_point() else value for value in values]
        if len(values) != len(list(tensors(self.structure))):
            return values[0] if len(values) == 1 else tuple(values)
        return packed(self.structure, values)

    def results(self, reference: str) -> dict[str, dict[str, Any]]:
        """For each variant its ``metrics``, those of the ``reference`` beside them, and the ``metric`` that decides."""
        if self.failure:
            return {}
        try:
            means = {name: sums.means() for name, sums in self._sums.items()}
        except QtoolError as error:
            self.failure = str(error)
            return {}
        found = {name: {k: v for k, v in each.items() if k != "num_samples"} for name, each in means.items()}
        if self._unknown and math.isnan(found[reference].get(self.task.metric, 0.0)):
            got, do = f"NaN, and so '{self.task.metric}'", "clean the data, or have the task leave it out"
            self.failure = str(QtoolError("targets of the benchmark data", "numbers", got, do))
            return {}
        decides = {"metric": self.task.metric, "higher_is_better": self.task.higher_is_better}
        told = {name: {**decides, "metrics": own, "metrics_reference": found[reference]} for name, own in found.items()}
        for name, bounds in self._changes(found, reference):
            told[name]["metric_change_ci95"] = bounds
        return told

    def _changes(
        self, found: Mapping[str, Mapping[str, float]], reference: str
    ) -> Iterator[tuple[str, tuple[float, float]]]:
        """The 95 % interval of how much more the metric that decides is than the reference's.

        Nothing where the samples do not make up what the batches gave, as with a loss of pairs of samples, and where
        the task's ``finish`` cannot compute with some of them.
        """
        metric, alone = self.task.metric, self._alone or {}
        sums = {name: paired.joined([each for each, _ in parts]) for name, parts in alone.items()}
        if reference not in sums:
            return
        samples = paired.Paired(self.task, torch.cat([weights for _, weights in alone[reference]]))
        for name, own in sums.items():
            try:
                told, made = (means.get(metric, math.nan) for means in (found[name], samples.means(own)))
                if not paired.is_alike(told, made):
                    each = f"{told:.3g} in batches and {made:.3g} sample by sample"
                    self.apart = f"{metric} has no interval: it is {each}"
                    return
                if name == reference:
                    continue
                _, within = samples.change(metric, sums[reference], own)
            except QtoolError:
                return
            low, high = within(len(samples.weights))
            if math.isfinite(low) and math.isfinite(high):
                yield name, (low, high)


def predict(
    sessions: Mapping[str, Session],
    batches: Iterable[tuple[Any, Any]],
    *,
    samples: int | None = None,
    whole: int | None = None,
    scores: Scores | None = None,
    reference: str | None = None,
) -> tuple[dict[str, torch.Tensor], Any]:
    """The first output of every session for every sample, and the targets.

    These are a tensor, or a tuple of those in a mapping or the like; None where the data has none.

    ``whole`` is the batch size that sessions with an open batch are fed, padded; by default as the data comes.
    ``scores`` gets all outputs, batch after batch, where there are targets.
    Raises QtoolError where the data is empty or does not fit the inputs, or a sample that is not finite has no finite
    output.
    """
    outputs: dict[str, list[Array]] = {name: [] for name in sessions}
    base = reference or next(iter(sessions))
    first = sessions[base]
    targets: list[Any] = []
    seen, without = 0, 0
    for value, target in batches:
        feeds, layout = to_feeds(value, first.inputs), Layout.of(first.inputs)
        count = layout.count(feeds)
        keep = count if samples is None else min(count, samples - seen)
        judging = None if target is None else scores
        known = None if judging is None else cut(from_arrays(target), 0, keep, count)
        for name, session in sessions.items():
            found = [
                (_of_samples(part, axis, keep, count), axis)
                for part, axis in _run(session, value, count, whole, 1 if judging is None else None)
            ]
            outputs[name].append(_rows(*found[0]))
            if judging is not None:
                judging.add(name, [part for part, _ in found], known)
        _require_finite(layout, feeds, outputs[base][-1], seen, keep)
        targets.append(_head(target, keep, count))
        seen, without = seen + keep, without + (target is None)
        if samples is not None and seen >= samples:
            break
    if not seen:
        raise QtoolError("benchmark data", "at least one batch", "none", "pass test data with samples in it")
    if 0 < without < len(targets):
        warnings.warn(
            f"benchmark data: {without} of {len(targets)} batches have no targets: top-1 is not measured, and a task's "
            f"metrics are of the others alone; give all of them targets, {IGNORED} for a class that is not known",
            QtoolWarning,
            stacklevel=2,
        )
    return {name: _as_tensor(parts) for name, parts in outputs.items()}, _joined(targets)


def _require_finite(layout: Layout, feeds: Mapping[str, Array], output: Array, seen: int, keep: int) -> None:
    """Raises QtoolError for a sample that has no finite output and is not finite itself: no file is to blame."""
    if output.dtype.kind != "f" or np.isfinite(output.sum()):
        return
    values = torch.from_numpy(output).flatten(1)
    damaged = evaluate.unlike(values, values).any(1).nonzero().flatten() * keep // len(output)
    for row in damaged.tolist():
        if any(v.dtype.kind == "f" and not np.isfinite(v).all() for v in layout.taken(feeds, [row]).values()):
            raise QtoolError(
                f"benchmark data, sample {seen + row}", "finite inputs", "NaN or infinity, and so in its output",
                "clean the data",
            )  # fmt: skip


def _as_tensor(parts: list[Array]) -> torch.Tensor:
    """The parts as one tensor, floats of any size as float32; what shorter sequences do not have is −∞, masked."""
    values = [torch.from_numpy(part) for part in parts]
    if values[0].is_floating_point():
        return _filled([value.float() for value in values], -math.inf)
    if any(value.shape[1:] != values[0].shape[1:] for value in values):
        got = " and ".join(sorted({str(tuple(value.shape[1:])) for value in values})[:2])
        raise QtoolError("benchmark data", "whole-number outputs of one size", got, "pad all batches to one size")
    return torch.cat(values)


def _filled(parts: list[torch.Tensor], value: float) -> torch.Tensor:
    """The parts as one, filled up with ``value`` where others are longer behind the batch."""
    sizes = [max(found) for found in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_grown(part, sizes, value) for part in parts])


def _grown(part: torch.Tensor, sizes: list[int], value: float) -> torch.Tensor:
    missing = [size - own for size, own in zip(sizes, part.shape[1:], strict=True)]
    return torch.nn.functional.pad(part, [n for m in reversed(missing) for n in (0, m)], value=value)


def _run(
    session: Session, value: Any, count: int, whole: int | None, most: int | None
) -> Iterator[tuple[Array, int | None]]:
    """At most so many outputs of ``count`` samples, and the axis of each that counts them.

    One without (a single number) is that of the last part.
    """
    feeds, layout = to_feeds(value, session.inputs), Layout.of(session.inputs)
    size = layout.size or whole or count
    ran = [session.run(layout.taken(feeds, range(at, at + size)))[:most] for at in range(0, count, size)]
    for info, parts in zip_longest(session.outputs[: len(ran[0])], zip(*ran, strict=True)):
        axis = layout.axis(info, parts[0].shape, size)
        joined = parts[-1] if axis is None else np.concatenate(parts, axis)
        yield _of_samples(joined, axis, count, size * len(ran)), axis


def _of_samples(output: Array, axis: int | None, keep: int, count: int) -> Array:
    """What an output of ``count`` samples has of the first of them."""
    if axis is None:
        return output
    return output[(slice(None),) * axis + (slice(output.shape[axis] // count * keep),)]


def _rows(output: Array, axis: int | None) -> Array:
    """An output with the axis that counts samples first; of one without, a single one."""
    if axis is not None:
        return np.moveaxis(output, axis, 0)
    return output if output.ndim and len(output) == 1 else output[None]


def _head(target: Any, keep: int, count: int) -> Any:
    """The targets of the first of ``count`` samples; None where there are none, or they are no tensors (boxes, say)."""
    if isinstance(target, Mapping | tuple):
        return tuple(_head(each, keep, count) for each in tensors(from_arrays(target))) or None
    try:
        found = None if target is None else torch.atleast_1d(torch.as_tensor(target))  # type: ignore[no-untyped-call]
        return None if found is None else found[: len(found) // count * keep or keep]
    except (TypeError, ValueError, RuntimeError):
        return None


def _joined(targets: Sequence[Any]) -> Any:
    """All targets, of several each by itself; those of shorter sequences are filled up with what is not counted."""
    if all(isinstance(t, tuple) for t in targets):
        same = len({len(t) for t in targets}) == 1
        return tuple(each for each in map(_joined, zip(*targets, strict=True)) if each is not None) if same else None
    if any(not isinstance(t, torch.Tensor) or t.dim() != targets[0].dim() for t in targets):
        return None
    return _filled(list(targets), math.nan if targets[0].is_floating_point() else IGNORED)


def is_finite(reference: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether outputs are finite numbers, wherever the reference's are."""
    same = value.shape == reference.shape
    return not evaluate.unlike(reference, value).any() if same else bool(value.isfinite().all())


def judge(
    outputs: Mapping[str, torch.Tensor], targets: Any, *, reference: str, compare: Compare | None = None
) -> dict[str, dict[str, Any]]:
    """Each variant's accuracy and agreement with the reference (see :func:`qtool.evaluate.compare`).

    Raises QtoolError where a file gives NaN or infinity, or another shape than the reference.
    """
    measure = compare or _compare_any
    base = outputs[reference]
    for name, value in outputs.items():
        if not is_finite(base, value):
            raise QtoolError(
                f"'{name}'", "finite outputs", "NaN or infinity", "check the file; FP16 overflows above 65504"
            )
        if value.shape != base.shape:
            raise QtoolError(
                f"'{name}'", f"outputs like those of '{reference}', {tuple(base.shape)}", str(tuple(value.shape)),
                "compare files of the same model",
            )  # fmt: skip
    return {name: dict(measure(base, value, targets)) for name, value in outputs.items()}


def _compare_any(reference: torch.Tensor, other: torch.Tensor, targets: Any) -> dict[str, Any]:
    """Logits of samples, tokens or pixels are compared as classifications; other outputs by their SQNR alone.

    Of one number for each there is nothing to choose: every two would agree. Of whole numbers (classes) the share that
    is equal is told.
    """
    if not reference.is_floating_point():
        return {"num_samples": len(reference), "agreement": (reference == other).double().mean().item()}
    axis = evaluate.class_axis(reference, targets)
    if axis is None:
        return {"num_samples": len(reference), "sqnr_db": evaluate.sqnr_db(reference, other)}
    if not evaluate.are_classes(targets, reference, axis):
        return evaluate.compare(reference, other, axis=axis)
    known = targets[targets != IGNORED]
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < reference.shape[axis]:
        got = f"{int(known.min())} to {int(known.max())}"
        raise QtoolError(
            "benchmark data", f"classes from 0 to {reference.shape[axis] - 1}, as the outputs have", got,
            "use the data that the model is for, with indices as targets",
        )  # fmt: skip
    return evaluate.compare(reference, other, targets, axis=axis)


def unjudged(reference: torch.Tensor, targets: Any) -> str | None:
    """Why plain classification has no top-1 although samples have targets; None where it has, or these are none."""
    axis = evaluate.class_axis(reference, targets, asked=reference.dim() == 2)
    if not isinstance(targets, torch.Tensor) or axis is None or evaluate.are_classes(targets, reference, axis):
        return None
    got = f"{str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}"
    return f"top-1 was not measured: targets {got} are no class index for each answer of {tuple(reference.shape)}"
