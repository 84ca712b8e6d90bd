"""Algorithms: passes that make a post-training quantization more accurate, each of which can be switched off.

A pass works at one of two moments:

=============  ==============================================================================================
``float``      on the captured float graph with batch-norm folded, before observers are placed: it computes the
               same function and quantizes better
``integer``    on the converted graph, weights already integers and biases still float, before these become
               int32: it knows exactly what was lost
=============  ==============================================================================================

Both get a ``Subject``: the graph to change in place, the float graph it stands for, the placement and the calibration
batches. A pass that cannot apply raises ``Declined`` with its reason, or notes which parts it left; notes go into
the plan. They run in the order of ``ALGORITHMS``, whatever order they are asked for in: what knows the least about the
data comes first, and a bias that it settled is settled anew by those after it.

A new algorithm is one file with a function ``(Subject) -> None``, one line in ``ALGORITHMS``, one test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qtool.errors import UsageError, nearest
from qtool.quantization.algorithms.adaround import adaround
from qtool.quantization.algorithms.analytic import correct_biases_analytically
from qtool.quantization.algorithms.bias import SAMPLES as BIAS_SAMPLES
from qtool.quantization.algorithms.bias import correct_biases
from qtool.quantization.algorithms.brecq import brecq
from qtool.quantization.algorithms.equalize import SAMPLES as EQUALIZE_SAMPLES
from qtool.quantization.algorithms.equalize import equalize
from qtool.quantization.algorithms.gptq import gptq
from qtool.quantization.algorithms.gptq_small import SAMPLES as GPTQ_SAMPLES
from qtool.quantization.algorithms.gptq_small import gptq_small
from qtool.quantization.algorithms.pairs import keep_pairs, order_pairs
from qtool.quantization.algorithms.pixels import SAMPLES as PIXEL_SAMPLES
from qtool.quantization.algorithms.pixels import read_pixels
from qtool.quantization.algorithms.renorm import renormalize
from qtool.quantization.algorithms.smooth import SAMPLES as SMOOTH_SAMPLES
from qtool.quantization.algorithms.smooth import smooth
from qtool.quantization.algorithms.steps import learn_steps
from qtool.quantization.algorithms.subject import Declined, NothingToDo, Subject
from qtool.recipe import DEFAULT_ALGORITHMS

__all__ = ["ALGORITHMS", "CHANGES", "Algorithm", "Declined", "Subject", "check_names", "run_passes", "samples_read"]


@dataclass(frozen=True)
class Algorithm:
    """A pass, the moment it works at (``float`` or ``integer``), and how many samples it reads: None for all.

    ``train`` is what of it goes for a graph that is to be trained with batch-norm live in it, before it is prepared.
    """

    moment: str
    run: Callable[[Subject], None]
    samples: int | None = None
    train: Callable[[Subject], None] | None = None


ALGORITHMS: dict[str, Algorithm] = {
    "pixels": Algorithm("float", read_pixels, samples=PIXEL_SAMPLES),
    "smooth": Algorithm("float", smooth, samples=SMOOTH_SAMPLES),
    "equalize": Algorithm("float", equalize, samples=EQUALIZE_SAMPLES),
    "pairs": Algorithm("float", order_pairs, samples=0, train=keep_pairs),
    "analytic-bias": Algorithm("integer", correct_biases_analytically, samples=0),
    "gptq-small": Algorithm("integer", gptq_small, samples=GPTQ_SAMPLES),
    "gptq": Algorithm("integer", gptq),
    "adaround": Algorithm("integer", adaround),
    "brecq": Algorithm("integer", brecq),
    "renorm": Algorithm("integer", renormalize),
    "bias": Algorithm("integer", correct_biases, samples=BIAS_SAMPLES),
    "steps": Algorithm("integer", learn_steps),
}
CHANGES = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.moment == "float")
"""Those that change what is calibrated: what they did is saved with the ranges, and repeated with them."""


def check_names(names: Iterable[str]) -> None:
    """Raises UsageError with the nearest name for an algorithm that does not exist."""
    for name in names:
        if name not in ALGORITHMS:
            raise UsageError("algorithms", "a known algorithm", repr(name), nearest(name, ALGORITHMS))


def samples_read(names: Iterable[str]) -> int | None:
    """How many calibration samples the algorithms read, None for all. Raises UsageError for an unknown one."""
    check_names(asked := list(names))
    counts = [ALGORITHMS[name].samples for name in asked]
    return None if None in counts else max((count for count in counts if count is not None), default=0)


def run_passes(names: Iterable[str], moment: str, subject: Subject | None, reason: str = "") -> tuple[str, ...]:
    """Runs those of ``names`` whose moment it is on ``subject``; returns the notes of all, refusals included.

    ``moment``: as of an ``Algorithm``, or ``train`` for what goes where batch-norm trains. Without a subject
    each of them is declined for ``reason``. What nobody named and has nothing to do is silent.
    """
    check_names(asked := list(names))
    notes: list[str] = []
    named = subject is None or (subject.config.effort is None and tuple(asked) != DEFAULT_ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        run = algorithm.train if moment == "train" else algorithm.run if algorithm.moment == moment else None
        if name in asked and run is not None:
            try:
                if subject is None:
                    raise Declined(reason)
                run(subject)
            except Declined as refusal:
                if named or not isinstance(refusal, NothingToDo):
                    notes.append(f"{name} declined: {refusal}")
    return (*(subject.notes if subject else ()), *notes)
