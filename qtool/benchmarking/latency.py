"""Timing variants against each other on a machine that other things happen on.

Clocks change, caches are shared and neighbours wake up, so two variants timed one after the other are
timed on two different machines. Here they are interleaved: in each *round* every variant runs one
short burst, in an order drawn anew, so that all have the same chance of a quiet moment. The speed-up is the ratio
of their quiet times (``statistics.py``), with an interval; rounds go on until that is as narrow as asked, or the
time is up, which is then said. It is looked at after 40 rounds and after every quarter more: who looks at each one
stops where chance made it narrow.

Where a process's memory happens to lie makes the same file up to 2 % faster or slower for as long as it lives. So all
variants start anew, together, after 10, 20 and 30 rounds and from then on so often that a fifth of the time goes
into it; less often where opening them takes so long that a third of the time would be gone.

What a busy neighbour makes of the speed-up is told beside it: the median over rounds of the ratio of the two bursts'
medians. It is a figure of that hour on that machine, and the other one of the files.

The first run of a burst finds the caches full of another variant and is thrown away where a run is
short enough for that to matter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from qtool.benchmarking.statistics import (
    BLOCKS,
    LEAST_ROUNDS,
    percentiles_ms,
    quantile_sketch_ms,
    quiet_interval,
    quiet_ratio,
    spread,
)

BURST_SECONDS = 0.02
_LONG_RUN = 0.1
_NOISY = 0.05
_BUSY = 0.02
_SITTING = BLOCKS
_SITTINGS = 4
_LOOKS = frozenset(round(4 * BLOCKS * 1.25**k) for k in range(60))


class Burst(Protocol):
    """Runs one variant ``warm + runs`` times: the seconds of the last ``runs``, and what they waited for a core."""

    def __call__(self, runs: int, warm: int) -> tuple[list[float], float]: ...


@dataclass
class Timings:
    """What was measured of one variant: the seconds of every run, by round, and of the wait for a core.

    ``sittings`` are the rounds with which it was started anew.
    """

    bursts: list[list[float]] = field(default_factory=list)
    waited: float = 0.0
    sittings: list[int] = field(default_factory=lambda: [0])

    def add(self, seconds: list[float], waited: float) -> None:
        """Adds one burst."""
        self.bursts.append(seconds)
        self.waited += waited

    @property
    def runs(self) -> list[float]:
        """Every run."""
        return [one for burst in self.bursts for one in burst]

    @property
    def rounds(self) -> list[float]:
        """Each round's median."""
        return [float(np.median(burst)) for burst in self.bursts]


@dataclass(frozen=True)
class Stopping:
    """When to stop: the relative width of the speed-ups' 95 % intervals, and the most seconds to spend."""

    width: float = 0.03
    seconds: float = 20.0


@dataclass
class Renewal:
    """Starts all variants anew when that is due: ``start`` does it, which took ``seconds`` when they were opened."""

    start: Callable[[], None]
    seconds: float
    count: int = 0
    spent: float = 0.0
    rounds: int = 0
    begun: float = 0.0

    def is_due(self, rounds: int, elapsed: float, limit: float) -> bool:
        """Whether to start anew after so many rounds and seconds, of which there are ``limit``."""
        if rounds - self.rounds < _SITTING or self.spent + self.seconds > limit / 3:
            return False
        return self.count < _SITTINGS - 1 or elapsed - self.begun >= 4 * self.seconds

    def done(self, rounds: int, before: float, after: float) -> None:
        """Remembers a start: after how many rounds it was, when it began and when it was over."""
        self.seconds = after - before
        self.spent += self.seconds
        self.count, self.rounds, self.begun = self.count + 1, rounds, after


def interleave(
    bursts: Mapping[str, Burst],
    *,
    reference: str,
    stopping: Stopping,
    seed: int = 0,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] | None = None,
    renewal: Renewal | None = None,
) -> dict[str, Timings]:
    """Times every variant in rounds of random order until the speed-ups are known well enough.

    At least six rounds are run whatever the time, since fewer give no 95 % interval. ``progress`` is
    told the fraction of the time that is used up. ``renewal`` starts the variants anew in between.
    """
    order, timings = random.Random(seed), {name: Timings() for name in bursts}
    plan = {name: _burst_size(burst, warm_up) for name, burst in bursts.items()}
    start = clock()
    while not _done(timings, reference, stopping, clock() - start):
        rounds, elapsed = len(timings[reference].bursts), clock() - start
        if renewal and renewal.is_due(rounds, elapsed, stopping.seconds):
            renewal.start()
            for name, burst in bursts.items():
                burst(1, warm_up)
                timings[name].sittings.append(rounds)
            renewal.done(rounds, elapsed, clock() - start)
        for name in order.sample(list(bursts), len(bursts)):
            timings[name].add(*bursts[name](*plan[name]))
        if progress:
            progress(min(1.0, (clock() - start) / max(stopping.seconds, 1e-9)))
    return timings


def _burst_size(burst: Burst, warm_up: int) -> tuple[int, int]:
    """Warms a variant up and decides how many runs make a burst, and how many before it are thrown away."""
    one = burst(1, warm_up)[0][0]
    if one >= _LONG_RUN:
        return 1, 0
    return max(1, min(200, round(BURST_SECONDS / max(one, 1e-7)))), 1


def _done(timings: Mapping[str, Timings], reference: str, stopping: Stopping, elapsed: float) -> bool:
    rounds = len(timings[reference].bursts)
    if rounds < LEAST_ROUNDS:
        return False
    if elapsed >= stopping.seconds:
        return True
    return rounds in _LOOKS and all(
        relative_width(speedup(timings, reference, name)) <= stopping.width for name in timings if name != reference
    )


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the reference in quiet moments, with the 95 % interval (None below six rounds)."""

    ratio: float
    interval: tuple[float, float] | None


def speedup(timings: Mapping[str, Timings], reference: str, name: str) -> Speedup:
    """The reference's quiet time over the variant's, and its interval."""
    pair = timings[reference].bursts, timings[name].bursts
    return Speedup(quiet_ratio(*pair), quiet_interval(*pair, timings[name].sittings))


def typical_speedup(timings: Mapping[str, Timings], reference: str, name: str) -> float:
    """The median over rounds of reference time / variant time: with whatever else the machine did."""
    pairs = zip(timings[reference].rounds, timings[name].rounds, strict=True)
    return float(np.median([base / own for base, own in pairs]))


def relative_width(value: Speedup) -> float:
    """The interval's width over the ratio; infinite where there is no interval."""
    return (value.interval[1] - value.interval[0]) / value.ratio if value.interval else float("inf")


def describe(timings: Mapping[str, Timings], *, reference: str, batch_size: int, width: float) -> dict[str, Any]:
    """Each variant's latency, throughput and speed-up at one batch size, as plain values.

    ``converged`` says whether the interval became as narrow as asked.
    """
    return {name: _one(timings, reference, name, batch_size, width) for name in timings}


def _one(timings: Mapping[str, Timings], reference: str, name: str, batch_size: int, width: float) -> dict[str, Any]:
    own, runs = timings[name], timings[name].runs
    gain = Speedup(1.0, None) if name == reference else speedup(timings, reference, name)
    return {
        "batch_size": batch_size,
        **percentiles_ms(runs),
        "throughput_per_s": batch_size * len(runs) / sum(runs),
        "speedup": gain.ratio,
        "speedup_ci95": list(gain.interval) if gain.interval else None,
        "converged": name == reference or relative_width(gain) <= width,
        "speedup_typical": 1.0 if name == reference else typical_speedup(timings, reference, name),
        "num_runs": len(runs),
        "num_rounds": len(own.bursts),
        "num_processes": len(own.sittings),
        "spread": spread(own.rounds),
        "waiting_share": own.waited / (own.waited + sum(runs)),
        "latency_quantiles_ms": quantile_sketch_ms(runs),
    }


def noise(measured: Mapping[str, Mapping[str, Any]], *, load: float | None) -> dict[str, Any]:
    """How steady the machine was: the spread of the rounds of each variant, and the load beside it.

    ``noisy`` is set where a variant's own rounds vary by more than 5 %, or an interval stayed wider
    than asked. A speed-up that is another by more than 5 % with whatever else the machine did is told in both ways.
    """
    worst = max((entry["spread"] for entry in measured.values()), default=0.0)
    wide = [name for name, entry in measured.items() if not entry["converged"]]
    reasons = []
    if worst > _NOISY:
        reasons.append(f"the same file's time varied by {worst:.0%} between rounds")
    if wide:
        reasons.append(f"the speed-up of {', '.join(wide)} is known less well than was asked")
    reasons += [
        f"{name} was {entry['speedup']:.2f}x as fast in quiet moments and {entry['speedup_typical']:.2f}x typically"
        for name, entry in measured.items()
        if abs(entry["speedup_typical"] / entry["speedup"] - 1) > _NOISY
    ]
    waiting = max((entry["waiting_share"] for entry in measured.values()), default=0.0)
    if waiting > _BUSY:
        reasons.append(f"other processes held the cores for up to {waiting:.0%} of the time (taken out of the figures)")
    return {
        "spread": worst,
        "waiting_share": waiting,
        "load": load,
        "noisy": bool(worst > _NOISY or wide),
        "reasons": reasons,
    }
