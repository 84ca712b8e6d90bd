"""The search for the cheapest quantization that keeps a contract.

The rungs of a ladder, in the order of what they cost whoever runs the model, then of what they cost here:

1. *min-max*: what ``--effort fast`` stands for, where neither ranges nor algorithms were chosen;
2. *as asked*: the options as they were given (by default ranges by the network's error, SmoothQuant, equalization,
   corrected biases and GPTQ in small layers);
3. *free*: bias correction by what batch-norm tells, which reads no data, where the options have none;
4. *usually best*: what ``--effort best`` stands for in 8 bits. It costs minutes here and nothing to
   whoever runs the model, and where it is not met either, the rungs below rarely are before the mixed ones;
5. *ranges*: the other ways to read ranges from the same observations, for activations, then for weights;
6. *corrections*: bias correction on samples, equalization, both;
7. *further*: every other algorithm that is registered, each on top of what helped; those that learn the rounding take
   minutes, and are passed over where the error would have to fall by more than they ever take off;
8. *mixed*: the units that hurt most, alone, in 8 bits where weights have 6 or fewer, else left in float: as many as
   their harm, added up, says are enough, then as few as will do;
9. *training*: quantization-aware training, where there is data to train on.

The last two calibrate anew where ranges were given.

A rung stands on the best options so far, and "best" means closer to the float model by more than noise on the same
validation samples: otherwise the earlier, cheaper options stay, and what gained nothing is part of no later candidate.
No options are tried twice, and a model that equals an earlier one (an algorithm declined, say) is not judged again: it
is no candidate of its own, and ``notes`` say so. One that cannot be made (the last integer unit left in float, a
training that fails) is passed over, its reason among the notes. The first candidate that is met ends the search.

All are judged on the same samples, and one that lies at its limit passes in about 2.5 % of cases, on one side of a 95 %
interval. Two of them pass in 5 % at most (Bonferroni), as is promised; where more were looked at ``notes`` say how
many. Intervals that made up for it would have the later rungs ask for several times as many samples.

Candidates are made and judged by a function handed in, which may know them already: a search that was killed goes
through the same candidates again and finds their results.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import QtoolError
from qtool.quantization.contracts.contract import Judge, Scores, Verdict
from qtool.recipe import ALGORITHMS, RANGES, WEIGHT_RANGES, QuantizeConfig, settings_of
from qtool.units import many

MOST_FLOAT = 0.5
"""The greatest share of the units that the search leaves in float."""
USUALLY_BEST: Mapping[str, Any] = settings_of("best", weight_bits=8)
SURE_OF = 2
"""Candidates on the same samples of which 95 % confidence holds together."""
CHOSEN = ("ranges", "weight_ranges", "algorithms", "ranges_from")
"""Options that say how ranges and weights are to be found."""
FREE = ("analytic-bias",)
CORRECTIONS = (("bias",), ("equalize",), ("equalize", "bias"))
LEARNED = ("adaround", "brecq")
LEFT_BY_LEARNING = 0.25
"""The least share of the error's power that they may leave: of a ResNet-20 and a MobileNetV2 with 4-bit weights they
left four fifths of what GPTQ does, with 8-bit ones nearly all."""
INCLUDED: Mapping[str, tuple[str, ...]] = {"bias": ("gptq-small", "gptq"), "gptq-small": ("gptq",)}
"""What others do as well: beside one of these an algorithm has nothing to add."""


@dataclass(frozen=True)
class Trial:
    """One candidate: its options, what it made of the validation samples, and plain ``facts`` (size, time, …).

    ``same_as`` is the name of an earlier candidate whose model it is, to the last bit.
    """

    name: str
    config: QuantizeConfig
    scores: Scores
    verdict: Verdict
    facts: Mapping[str, Any]
    same_as: str | None = None


QAT = "qat"
"""The name of the candidate that is trained."""


class OutOfTime(Exception):
    """The time budget is used up."""


def kept(trial: Trial | None) -> Trial | None:
    """The trial where it was made and keeps the contract."""
    return trial if trial is not None and trial.verdict.met else None


Attempt = Callable[[str, QuantizeConfig], Trial]
Units = Callable[[QuantizeConfig], list[dict[str, Any]]]


class Search:
    """Climbs the ladder from ``config``.

    ``attempt(name, config)`` makes and judges a candidate, or raises OutOfTime; ``units(config)`` are the integer
    units, the most harmful first. ``can_train`` says whether there is data for the last rung.
    """

    def __init__(self, config: QuantizeConfig, judge: Judge, attempt: Attempt, units: Units, can_train: bool) -> None:
        self.config = dataclasses.replace(config, effort=None)  # a candidate is what its settings are
        self.judge, self._attempt, self.units, self.can_train = judge, attempt, units, can_train
        self.trials: list[Trial] = []
        self.repeats: list[Trial] = []
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.out_of_time = False

    def run(self) -> Trial | None:
        """The first candidate that keeps the contract, or None."""
        try:
            for rung in self._ladder():
                if (met := rung(self)) is not None:
                    self._note_looks()
                    return met
        except OutOfTime:
            self.out_of_time = True
        return None

    def _note_looks(self) -> None:
        if (count := len(self.trials)) > SURE_OF:
            self.notes.append(
                f"{count} candidates were judged on the same samples, and each that lies at the limit passes in about "
                "2.5 % of cases: believe what 'qtool benchmark' finds on the test part, which chose nothing"
            )

    def _ladder(self) -> tuple[Callable[[Search], Trial | None], ...]:
        if self.config.method == "given" or self.config.mode == "qat":
            return (as_asked,)
        return RUNGS if self.config.method == "auto" and self.can_train else RUNGS[:-1]

    @property
    def base(self) -> Trial:
        """The trial whose options the next rung stands on."""
        best = self.trials[0]
        for trial in self.trials[1:]:
            if trial.config.overrides == self.config.overrides and trial.config.mode == "ptq":
                best = trial if self.judge.better(trial.scores, best.scores) else best
        return best

    @property
    def closest(self) -> Trial:
        """The trial that is nearest to the contract; of equals, the first."""
        return min(self.trials, key=lambda trial: trial.verdict.excess)

    @property
    def trained(self) -> bool:
        """Whether a training was tried, whatever came of it."""
        return QAT in self.failed or any(trial.config.mode == "qat" for trial in (*self.trials, *self.repeats))

    def attempt(self, name: str, **changes: Any) -> Trial | None:
        """Makes and judges the base's options with ``changes``; None where that fails, but for the first candidate."""
        try:
            trial = self._attempt(name, self._changed(changes))
        except QtoolError as error:
            if not self.trials:
                raise
            self.notes.append(f"{name} could not be made: {error}")
            self.failed.append(name)
            return None
        if trial.same_as is not None:
            self.notes.append(f"{name} changes nothing: it is the model of '{trial.same_as}'")
        (self.trials if trial.same_as is None else self.repeats).append(trial)
        return trial

    def attempt_new(self, name: str, **changes: Any) -> Trial | None:
        """The trial of the base's options with ``changes`` where they are new and met; None otherwise."""
        if any(trial.config == self._changed(changes) for trial in (*self.trials, *self.repeats)):
            return None
        return kept(self.attempt(name, **changes))

    def _changed(self, changes: Mapping[str, Any]) -> QuantizeConfig:
        return dataclasses.replace(self.base.config if self.trials else self.config, **changes)


def min_max(search: Search) -> Trial | None:
    """Extremes, unless ranges or algorithms are other than what they are by default, or saved."""
    chosen = any(getattr(search.config, name) != getattr(QuantizeConfig(), name) for name in CHOSEN)
    return None if chosen else kept(search.attempt("ptq, minmax", **settings_of("fast", search.config.weight_bits)))


def as_asked(search: Search) -> Trial | None:
    """The options as they were given."""
    asked = {name: getattr(search.config, name) for name in ("ranges", "algorithms")}
    algorithms = asked["algorithms"] or () if search.config.mode == "ptq" else ()
    return kept(search.attempt(f"{search.config.mode}, {' + '.join((asked['ranges'], *algorithms))}", **asked))


def free(search: Search) -> Trial | None:
    """What costs nothing, here or later."""
    return _algorithms(search, (FREE,))


def usually_best(search: Search) -> Trial | None:
    """Output-error ranges and second-order rounding beside the algorithms asked for; given ranges stay."""
    names = (*(search.config.algorithms or ()), *USUALLY_BEST["algorithms"])
    changes: dict[str, Any] = {"algorithms": _together(names)}
    if search.config.ranges_from is None:
        changes["ranges"] = USUALLY_BEST["ranges"]
    parts = [f"ranges {changes['ranges']}"] if "ranges" in changes else []
    return search.attempt_new(" + ".join([*parts, *changes["algorithms"]]), **changes)


def better_ranges(search: Search) -> Trial | None:
    """Other estimators of activation ranges, then of weight ranges, beside what did best; none where some are given.

    Where weights alone are quantized, activations have none.
    """
    if search.config.ranges_from is not None:
        return None
    activations = () if search.config.weights_only else (("ranges", RANGES),)
    for field, choices in (*activations, ("weight_ranges", WEIGHT_RANGES)):
        for choice in choices:
            if choice != getattr(search.config, field):
                parts = (f"{field.replace('_', ' ')} {choice}", *(search.base.config.algorithms or ()))
                met = search.attempt_new(" + ".join(parts), **{field: choice})
                if met is not None:
                    return met
    return None


def corrections(search: Search) -> Trial | None:
    """Equalization and bias correction."""
    return _algorithms(search, CORRECTIONS)


def further(search: Search) -> Trial | None:
    """Each other algorithm, on top of what helped."""
    known = {*FREE, *(name for names in CORRECTIONS for name in names)}
    return _algorithms(search, ((name,) for name in ALGORITHMS if name not in known and _may_do(search, name)))


def _may_do(search: Search, name: str) -> bool:
    """Whether an algorithm that takes minutes may be enough, if it does more than it has ever done."""
    base = search.base
    if name not in LEARNED or base.verdict.met_with(LEFT_BY_LEARNING):
        return True
    search.notes.append(
        f"{name} was not tried: it takes minutes, and with a quarter of the error of '{base.name}' the contract "
        "would not be kept either"
    )
    return False


def _algorithms(search: Search, groups: Iterable[tuple[str, ...]]) -> Trial | None:
    for names in groups:
        wanted = _together((*(search.base.config.algorithms or ()), *names))
        met = search.attempt_new(" + ".join(wanted), algorithms=wanted)
        if met is not None:
            return met
    return None


def _together(names: tuple[str, ...]) -> tuple[str, ...]:
    """The algorithms in their order, without those that another of them includes."""
    return tuple(n for n in ALGORITHMS if n in names and not set(INCLUDED.get(n, ())) & set(names))


def mixed(search: Search) -> Trial | None:
    """The most harmful units in more bits: as many as their harm says are enough, then as few as are needed.

    Weights of 6 bits or fewer are first tried in 8, all else is left in float.
    """
    base = search.base
    units = search.units(base.config)
    order, most = [unit["name"] for unit in units], max(1, int(len(units) * MOST_FLOAT))
    for choice in ("int8", "float") if base.config.weight_bits < 7 else ("float",):
        trial = _fewest(search, base.config, order[:most], _enough(base, units, most), choice)
        if trial is not None:
            return trial
    if most < len(order):
        search.notes.append(f"no more than {most} of {len(order)} units were tried in float")
    return None


def _enough(base: Trial, units: list[dict[str, Any]], most: int) -> int:
    """How many of the most harmful units have to go for ``base`` to keep the contract, if harm adds up."""
    harm = [_harm(unit) for unit in units]
    total = sum(harm) or 1.0
    for count in range(1, most):
        if base.verdict.met_with(sum(harm[count:]) / total):
            return count
    return most


def _harm(unit: Mapping[str, Any]) -> float:
    """What a unit alone adds to the error's power, on a scale that all units have."""
    return float(unit["kl"]) if unit["kl"] is not None else 10 ** (-unit["sqnr_db"] / 10)


def _fewest(search: Search, base: QuantizeConfig, order: list[str], count: int, choice: str) -> Trial | None:
    """The trial with the least number of the most harmful units that will do; None where all of ``order`` will not.

    From ``count`` on it looks in steps that double, up or down as needed, then in the middle of what is left.
    """
    low, high, step, met = 0, len(order) + 1, 1, None
    while high - low > 1:
        try:
            trial = kept(_leave(search, base, order[:count], choice))
        except OutOfTime:
            if met is None:
                raise
            return met
        low, high, met = (count, high, met) if trial is None else (low, count, trial)
        if met is not None and low:
            count = (low + high) // 2
        else:
            count, step = min(low + step, len(order)) if met is None else max(1, high - step), 2 * step
    return met


def _leave(search: Search, base: QuantizeConfig, names: list[str], choice: str) -> Trial | None:
    """A trial with these units in more bits; other values are rounded then, of which saved ranges know nothing."""
    overrides = {glob.escape(name): choice for name in names} | base.overrides
    name = f"{many(len(names), 'unit')} in {choice}"
    return search.attempt(name, overrides=overrides, ranges_from=None)


def training(search: Search) -> Trial | None:
    """Quantization-aware training of the options that did best, from ranges of its own: saved ones may be another
    graph's.
    """
    best = search.base
    trial = search.attempt(QAT, mode="qat", algorithms=None, ranges_from=None)
    if trial is None or trial.verdict.met:
        return trial
    if not search.judge.better(trial.scores, best.scores):
        search.notes.append(f"qat comes no nearer to the float model than '{best.name}', and is left")
    return None


RUNGS: tuple[Callable[[Search], Trial | None], ...] = (
    min_max, as_asked, free, usually_best, better_ranges, corrections, further, mixed, training,
)  # fmt: skip


def frontier(trials: list[Trial]) -> list[Trial]:
    """The trials than which none is both smaller and closer to the contract, the smallest first."""
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.facts["size_bytes"], t.verdict.excess)):
        if not found or trial.verdict.excess < found[-1].verdict.excess:
            found.append(trial)
    return found
