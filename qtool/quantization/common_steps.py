"""Common steps: sums and concatenations that round nothing, since what they read has their step.

Of integers with one step Δ, whatever their zero points, a sum is an integer of that step again:

    Δ (q_a − z_a) + Δ (q_b − z_b) = Δ (q − z),    q = q_a + q_b − z_a − z_b + z

A residual path of n blocks, each with its branch rounded to a step of its own, is rounded 2 n times on its way; with
one step for all of it n times, and its sums clip but no longer round. The price is that the step is the coarsest of
them all. With rounding as uniform noise of variance Δ²/12, and w the squared derivative of the network's outputs by all
values of a tensor (``Tails.energy``), a network is given the noise

    Σ w_t · ρ_t · Δ_t²/12

over its tensors, ρ the share of a tensor's values that are rounded: 1 for what a layer makes, 0 for a sum and for each
part of a concatenation whose operands have its step. Steps are joined while that makes less of it, what gains most
first. No range gets narrower: what was not clipped is not clipped.

Not looked at: tensors of which the operator decides a limit (ReLU6's 6) or the whole range, and those of which a side
would be but a few steps (what a LeakyReLU leaves of negative values): rounding all of that to 0 is no noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtool.quantization.calibration.observers import RangeObserver
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.prepared import Prepared
from qtool.units import many

KINDS = ("add", "concat")
POSITIVE = 0.0, math.inf
"""ReLU's limits, which any step keeps: 0 is the least integer."""
SIGNIFICANT = 15
"""Bits of a common step: so few that 255 of them are a float32 exactly, and all tensors' steps come out the same."""
LEAST = 4
"""Steps that each side of a range has at least, if it has any."""


@dataclass(frozen=True)
class Joint:
    """An operator that would round nothing if its ``operands`` had the step of its ``result``; both are names.

    ``shares``: each operand's part of the result's values; empty for a sum, each of whose values holds all of them.
    """

    result: str
    operands: tuple[str, ...]
    shares: tuple[float, ...] = ()

    def rounded(self, group: frozenset[str]) -> float:
        """The share of the result's values that are rounded if ``group`` has one step, the result's."""
        if not self.shares:
            return float(not group.issuperset(self.operands))
        return sum(share for name, share in zip(self.operands, self.shares, strict=True) if name not in group)


def join_steps(
    steps: Mapping[str, float], weights: Mapping[str, float], most: Mapping[str, float], joints: Sequence[Joint]
) -> dict[str, frozenset[str]]:
    """The tensors that are to have one step, by the name of each that is among them.

    ``steps``, ``weights`` and the ``most`` that a step may be are of all tensors that may have another step than their
    own; see the module's text.
    """
    by_result = {joint.result: joint for joint in joints}
    groups = {name: frozenset((name,)) for name in steps}
    runs = [names for joint in joints for names in _runs(joint, by_result) if names <= steps.keys()]

    def noise(group: frozenset[str]) -> float:
        rounded = {name: by_result[name].rounded(group) if name in by_result else 1.0 for name in group}
        return max(steps[name] for name in group) ** 2 * math.fsum(weights[name] * rounded[name] for name in group)

    def joined(names: frozenset[str]) -> tuple[float, frozenset[str]]:
        """The noise that goes where all of ``names`` and what already has their steps get one; and which these are."""
        parts = {groups[name] for name in names}
        union = frozenset().union(*parts)
        if max(steps[name] for name in union) > min(most[name] for name in union):
            return 0.0, union
        before = math.fsum(map(noise, parts))
        return before - noise(union) if len(parts) > 1 else 0.0, union

    gained = True
    while gained:
        gained = False
        for run in sorted(runs, key=lambda run: joined(run)[0], reverse=True):
            gain, union = joined(run)
            if gain > 0:
                groups.update(dict.fromkeys(union, union))
                gained = True
    return {name: group for name, group in groups.items() if len(group) > 1}


def _runs(joint: Joint, by_result: Mapping[str, Joint]) -> list[frozenset[str]]:
    """The tensors that may come to have one step at once: a concatenation with each part, a sum with all that it reads.

    A sum's go on with the sums that it reads, and with those that these read, since a path may gain only as a whole.
    """
    if joint.shares:
        return [frozenset((joint.result, operand)) for operand in joint.operands]
    found, names, ends = [], frozenset((joint.result,)), [joint]
    while ends:
        names = names.union(*(end.operands for end in ends))
        found.append(names)
        above = dict.fromkeys(name for end in ends for name in end.operands)
        ends = [by_result[name] for name in above if name in by_result and not by_result[name].shares]
    return found


def share_steps(prepared: Prepared, ranges: dict[str, Any]) -> str | None:
    """Gives the observers of sums, concatenations and what they read common steps where that rounds less.

    ``ranges`` are those chosen so far, and are changed likewise. Returns a note of what was done; None for nothing.
    """
    observers = {name: o for name, o in prepared.observers.items() if _is_free(o)}
    joints = [j for j in _joints(prepared.placement) if {j.result, *j.operands} <= prepared.observers.keys()]
    named = [name for joint in joints for name in (joint.result, *joint.operands) if name in observers]
    steps = {name: _step(observers[name]) for name in named}
    weights = {name: float(np.mean(observers[name].histogram.tails.energy)) for name in steps}
    most = {name: _most(observers[name]) for name in steps}
    groups = join_steps(steps, weights, most, joints)
    for group in dict.fromkeys(groups.values()):
        _give(group, _rounded_up(max(steps[name] for name in group)), observers, joints)
    for name in groups:
        ranges[name]["low"], ranges[name]["high"] = observers[name].chosen
    exact = sum(joint.rounded(groups.get(joint.result, frozenset())) == 0 for joint in joints)
    if not exact:
        return None
    return (
        f"ranges: {exact} of {many(len(joints), 'sum')} and concatenations round nothing: what they read has their step"
    )


def _give(group: frozenset[str], step: float, observers: Mapping[str, RangeObserver], joints: Sequence[Joint]) -> None:
    """Gives a group's observers ranges of one step; what is concatenated has the result's zero point where it can.

    Bytes are copied there then. So results come first, the last of them before what it reads.
    """
    places = {joint.result: place for place, joint in enumerate(joints)}
    for name in sorted(group, key=lambda name: (-places.get(name, -1), name)):
        readers = (j.result for j in joints if j.shares and name in j.operands and j.result in group)
        observers[name].chosen = _spread(observers[name], step, [observers[reader] for reader in readers])


def _joints(placement: Placement) -> list[Joint]:
    """The sums and concatenations of a placement, in order, all of whose operands and whose results are integers."""
    found = []
    for placed in placement.placed:
        if placed.pattern is None or placed.pattern.kind not in KINDS or not placed.quantized_output:
            continue
        if len(placed.operands) > 1:  # of the others the kernel adds what it has not rounded yet
            origins = [placement.origin(operand) for operand in placed.operands]
            shares = _shares(placed) if placed.pattern.kind == "concat" else ()
            found.append(Joint(placed.unit.name, tuple(map(placement.name_of, origins)), shares))
    return found


def _shares(placed: Placed) -> tuple[float, ...]:
    """The parts of a concatenation's values; those of sizes that a call decides count alike."""
    axis = placed.anchor.args[1] if len(placed.anchor.args) > 1 else 0
    parts, whole = ([node.meta["val"].shape[axis] for node in nodes] for nodes in (placed.operands, (placed.anchor,)))
    if not all(isinstance(size, int) for size in (*parts, *whole)):
        return (1 / len(parts),) * len(parts)
    return tuple(size / whole[0] for size in parts)


def _is_free(observer: RangeObserver) -> bool:
    """Whether a tensor may have a wider range, and its weight is known."""
    unlimited = observer.limits is None or (observer.limits == POSITIVE and not observer.options.symmetric)
    tails = observer.histogram.tails
    return observer.fixed is None and unlimited and tails is not None and bool(tails.energy)


def _ends(observer: RangeObserver) -> tuple[float, float]:
    """The chosen range with 0 in it."""
    assert observer.chosen is not None
    low, high = observer.chosen
    return min(low, 0.0), max(high, 0.0)


def _step(observer: RangeObserver) -> float:
    low, high = _ends(observer)
    return max(-low, high) / observer.quant_max if observer.options.symmetric else (high - low) / _levels(observer)


def _most(observer: RangeObserver) -> float:
    """The step that leaves the smaller side of a range a few."""
    return min((abs(end) for end in _ends(observer) if end), default=0.0) / LEAST


def _levels(observer: RangeObserver) -> int:
    return observer.quant_max - observer.quant_min


def _rounded_up(step: float) -> float:
    mantissa, exponent = math.frexp(step)
    return math.ldexp(math.ceil(math.ldexp(mantissa, SIGNIFICANT)), exponent - SIGNIFICANT)


def _spread(observer: RangeObserver, step: float, readers: Sequence[RangeObserver]) -> tuple[float, float]:
    """A range of that step around the chosen one: a reader's, or one with as much room below as above.

    An end at 0 stays there.
    """
    levels, (low, high) = _levels(observer), _ends(observer)
    if observer.options.symmetric:
        return -step * observer.quant_max, step * observer.quant_max
    for least, most in (_ends(reader) for reader in readers if reader.options == observer.options):
        if least <= low and high <= most and (observer.limits is None or least == low):
            return least, most
    room = levels - (high - low) / step
    below = 0 if low == 0 else levels if high == 0 else min(max(round(-low / step + room / 2), 0), levels)
    return -below * step, (levels - below) * step
