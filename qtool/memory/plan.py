"""Fitting a training step into a budget: which techniques to switch on, and how large a batch to take.

A plan is a choice from each row of a table: precision, optimizer, accumulation, checkpointing, the update inside the
backward pass. How long each takes is estimated from what the step computes and what the device was measured to do
(``qtool.memory.pace``), times a rule of thumb for what that does not see::

    rounding of bf16-true 1.05   8-bit AdamW 1.02   step in backward 1.05

A plan's peak is predicted (``qtool.memory.predict``), the fastest first, of about as fast ones, which an estimate
cannot tell apart, the plainest, and the first that fits is taken, or, where it has 4, 16, … micro-batches, that with
half as many. Where one does not fit, plans that save nothing more are passed over, and so is what the model cannot
take. Before all others but the fastest come the leanest, of which there are two or three: where even they need far
more, no other is looked at. Likewise, once two plans with as many micro-batches do not fit, the leanest of those comes
before the rest of them. What the user has set is never changed.

Of several devices, each has the budget, and a batch is so many samples for each. Where no plan fits, the number of
devices is found over which shards of the smallest one would.

Left out on purpose: LoRA and a smaller batch, which change what is trained.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qtool.errors import QtoolError
from qtool.recipe import TrainConfig

Peak = Callable[[TrainConfig], int]
"""The predicted peak of a config, in bytes."""
Seconds = Callable[[TrainConfig], float]
"""The estimated time of a config's step."""
ALIKE = 1.1
"""Times within which estimates are as good as equal: rates measured twice on a busy machine differ by as much."""
FAR = 1.25
"""Times the budget that the leanest plan may need for the others to be looked at: a technique can save a little less
than nothing."""
TRIED = 2
"""Plans of a kind that do not fit before the leanest of the kind is looked at, which often costs a prediction."""
INTERPOLATED = 4
"""Predictions for a number of devices after which it is looked for in the middle."""


@dataclass(frozen=True)
class Choice:
    """One entry of a row: the fields it sets, and what it takes beyond the estimate. Later ones save more."""

    changes: dict[str, Any]
    factor: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A config, how long its step is estimated to take in seconds, its predicted peak, and what it changes."""

    config: TrainConfig
    time: float
    peak_bytes: int
    changes: dict[str, Any]

    @property
    def flags(self) -> str:
        return flags(self.changes)


def flags(changes: dict[str, Any]) -> str:
    """Changes as they are typed.

    >>> flags({"precision": "bf16-mixed", "step_in_backward": True, "grad_clip": None})
    '--precision bf16-mixed --step-in-backward --grad-clip none'
    """
    return " ".join(_flag(name, value) for name, value in changes.items())


def difference(base: TrainConfig, config: TrainConfig) -> dict[str, Any]:
    """The fields of ``config`` that differ from ``base``."""
    given = vars(base)
    return {name: value for name, value in vars(config).items() if value != given[name]}


def _flag(name: str, value: Any) -> str:
    word = "--" + name.replace("_", "-")
    return word if value is True else f"{word} {'none' if value is None else value}"


def rows(config: TrainConfig) -> list[list[Choice]]:
    """The table for ``config``; the first choice of each row is what it says itself."""
    same = Choice({})
    micro = [4**k for k in range(1, 12) if config.micro_batches < 4**k < math.ceil(config.batch_size / config.devices)]
    found = [[same, *(Choice({"micro_batches": m}) for m in micro)]]
    if config.precision == "32-true":
        mixed = Choice({"precision": "bf16-mixed"})
        copies = config.devices > 1 and config.strategy == "ddp"  # they stay alike where none draws numbers of its own
        rounding = "compensated" if copies else "stochastic"
        found.append([same, mixed, Choice({"precision": "bf16-true", "rounding": rounding}, 1.05)])
    if config.optimizer == "adamw":
        found.append([same, Choice({"optimizer": "adamw8bit"}, 1.02)])
    found.append([same, Choice({"step_in_backward": True, "grad_clip": None}, 1.05)])
    found.append([same, Choice({"activation_checkpointing": True})])
    return found


def plans(
    config: TrainConfig, pinned: Sequence[str], legal: Callable[[TrainConfig], bool], seconds: Seconds
) -> Iterator[Any]:
    """(time, places in their rows, changes, config) of every legal plan, the fastest and then the plainest first.

    Steps of a factor ``ALIKE`` from the fastest on are told apart.
    """
    made = []
    for chosen in itertools.product(*(list(enumerate(row)) for row in rows(config))):
        changes = {key: value for _, choice in chosen for key, value in choice.changes.items()}
        changes = {key: value for key, value in changes.items() if getattr(config, key) != value}
        wanted = replace(config, **changes)
        if not set(changes) & set(pinned) and legal(wanted):
            time = seconds(wanted) * math.prod(choice.factor for _, choice in chosen)
            made.append((time, tuple(place for place, _ in chosen), changes, wanted))
    fastest = min((plan[0] for plan in made), default=0.0)
    return iter(sorted(made, key=lambda plan: (round(math.log(plan[0] / fastest, ALIKE)), len(plan[2]), plan[1])))


def choose(
    config: TrainConfig, budget: float, peak: Peak, *, pinned: Sequence[str], legal: Callable[[TrainConfig], bool],
    seconds: Seconds, most: int | None = None,
) -> tuple[Plan | None, Plan]:  # fmt: skip
    """The fastest plan that is predicted to fit ``budget`` bytes (or None), and the smallest that was looked at.

    ``legal`` says whether a config's options go together; ``pinned`` are the fields that stay. With ``most`` no more
    plans than that are predicted, and one that fits may not be found.
    """
    search = _Search(list(plans(config, pinned, legal, seconds)), budget, peak, most or sys.maxsize)
    found = search.first(search.made[:1]) or (None if search.hopeless() else search.first(search.made))
    assert search.smallest is not None
    count = found.changes.get("micro_batches", 0) // 2 if found else 0
    if found is not None and count > config.micro_batches:
        half = replace(found.config, micro_batches=count)
        time = found.time * seconds(half) / seconds(found.config)
        if legal(half) and time < found.time:
            better = search.predicted((time, (), found.changes | {"micro_batches": count}, half))
            found = better if better is not None and better.peak_bytes <= budget else found
    return found, search.smallest


class _Search:
    """The plans ``made``, and what is known of them so far."""

    def __init__(self, made: list[Any], budget: float, peak: Peak, most: int) -> None:
        self.made, self.budget, self.peak, self.most = made, budget, peak, most
        self.known: dict[TrainConfig, Plan | None] = {}
        self.failed: list[tuple[int, ...]] = []
        self.smallest: Plan | None = None

    def first(self, made: list[Any]) -> Plan | None:
        """The first of ``made`` that fits."""
        for one in made:
            if any(_saves_no_more(one[1], worse) for worse in self.failed) or not self._room(one[1]):
                continue
            if len(self.known) >= self.most:
                return None
            found = self.predicted(one)
            if found is not None and found.peak_bytes <= self.budget:
                return found
            self._note(one[1], found)
        return None

    def hopeless(self) -> bool:
        """Whether the leanest plans that the model takes are all far from fitting."""
        left = self.made
        while left:
            most = max(left, key=lambda one: sum(one[1]))
            found = self.predicted(most)
            self._note(most[1], found)
            if found is not None and not self._far(found):
                return False
            left = [one for one in left if one is not most and (found is None or not _saves_no_more(one[1], most[1]))]
        return True

    def _note(self, places: tuple[int, ...], found: Plan | None) -> None:
        if found is not None and found.peak_bytes > self.budget:
            self.failed.append(places)

    def _far(self, found: Plan) -> bool:
        """Whether plans that save less need not be looked at.

        Not where it needs more than the fastest: of a tiny model, techniques take more than they save.
        """
        plain = self.known.get(self.made[0][3])
        return FAR * self.budget < found.peak_bytes < (plain.peak_bytes if plain else math.inf)

    def _room(self, places: tuple[int, ...]) -> bool:
        """Whether the leanest plans of its kind may fit: with as many micro-batches, and the same of checkpointing."""
        for rows in ((0,), (0, -1)):
            kind = [places[row] for row in rows]
            tried = sum([worse[row] for row in rows] == kind for worse in self.failed)
            if tried < TRIED or len(self.known) >= self.most:
                continue
            alike = (one for one in self.made if [one[1][row] for row in rows] == kind)
            leanest = max(alike, key=lambda one: sum(one[1]))
            found = self.predicted(leanest)
            if found is not None and self._far(found) and _saves_no_more(places, leanest[1]):
                self._note(leanest[1], found)
                return False
        return True

    def predicted(self, one: Any) -> Plan | None:
        """The plan of such a tuple, predicted once; None where the model cannot take it."""
        time, _, changes, wanted = one
        if wanted in self.known:
            return self.known[wanted]
        found: Plan | None = None
        try:
            found = Plan(wanted, time, self.peak(wanted), changes)
        except QtoolError:
            if not changes:
                raise
        else:
            if self.smallest is None or found.peak_bytes < self.smallest.peak_bytes:
                self.smallest = found
        self.known[wanted] = found
        return found


def _saves_no_more(places: tuple[int, ...], than: tuple[int, ...]) -> bool:
    """Accumulation, the first row, may take more than none: of several copies, gradients and what exchanges them."""
    return bool(places[0]) == bool(than[0]) and all(a <= b for a, b in zip(places, than, strict=True))


def fewest_devices(
    config: TrainConfig, budget: float, peak: Peak, legal: Callable[[TrainConfig], bool], least: int = 1
) -> int | None:
    """The fewest devices over which ``config``, sharded, is predicted to fit ``budget`` bytes on each, or None.

    Between too few and enough it looks where they would fit if all that takes memory were shared out, a + b/n, and then
    in the middle. None too where it cannot be sharded, or that not predicted. Each device has at least ``least``
    samples of a batch.
    """

    def need(count: int) -> float:
        try:
            return peak(sharded(config, count))
        except QtoolError:
            return math.inf

    low, high = config.devices, config.batch_size // least
    if high <= low or not legal(sharded(config, high)) or (enough := need(high)) > budget:
        return None
    middle, too_much, tries = min(2 * low, high), math.inf, 0
    while high - low > 1:
        found = need(middle)
        low, too_much, high, enough = (
            (low, too_much, middle, found) if found <= budget else (middle, found, high, enough)
        )
        tries += 1
        if tries < INTERPOLATED and enough < too_much < math.inf:
            share = (budget - enough) / (too_much - enough)
            middle = min(max(math.ceil(1 / (1 / high + share * (1 / low - 1 / high))), low + 1), high - 1)
        else:
            middle = (low + high) // 2
    return high


def sharded(config: TrainConfig, devices: int) -> TrainConfig:
    """``config`` on so many devices, each with a shard of the model."""
    micro = min(config.micro_batches, math.ceil(config.batch_size / devices))
    return replace(config, devices=devices, strategy="fsdp", step_in_backward=False, micro_batches=micro)


def largest_batch(config: TrainConfig, budget: float, peak: Peak, most: int, least: int = 1) -> tuple[int, int]:
    """The largest power of two up to ``most`` whose step is predicted to fit ``budget`` bytes, and that peak.

    Of several devices, each takes such a power of two, and ``budget`` is for each. Two predictions give the line that
    the peak follows, further ones correct it. ``least`` samples for each device are the answer where not even they fit:
    trying will tell.
    """

    def of(share: int) -> int:
        return peak(replace(config, batch_size=share * config.devices, micro_batches=1))

    most = 2 ** int(math.log2(max(least, most // config.devices)))
    low, high = of(min(2, most)), of(min(8, most))
    each = max((high - low) / 6, 1.0)
    size = 2 ** int(math.log2(max(least, min(most, 2 + (budget - low) / each))))
    found = of(size)
    while found > budget and size > least:
        size //= 2
        found = of(size)
    while size < most and (next_one := of(2 * size)) <= budget:
        size, found = 2 * size, next_one
    return size * config.devices, found
