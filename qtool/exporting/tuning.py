"""Tuning on the runtime itself: which groups of units run faster in float on the machine at hand, and those reverted.

An integer kernel is not always the faster one. A runtime multiplies a sigmoid's table with its input in two passes over
memory where its float kernel takes one; a depthwise convolution has little to gain from integers at all. Which, depends
on the CPU, so it is measured:

1. both files, integer and float, are run once under the runtime's profiler, and the kernels' times are summed by block;
2. the groups whose float kernels are predicted to save time are found from that (:mod:`qtool.exporting.groups`);
3. a file is made of each that would save half a percent or more, four at most, and all are raced against the integer
   file in interleaved rounds;
4. those that are faster beyond doubt are kept, together if they are faster still together.

A group stays reverted only where the speed-up's 95 % interval lies above 1, and where the SQNR to the float model is
no lower than before by more than ``MAX_LOSS_DB``: a float unit rounds nothing, so it mostly rises. If nothing is
predicted to be faster, nothing is raced. The measuring itself comes in from outside (``race``, ``profile``): here it is
decided what to measure and what follows from it.

Left out on purpose: reverting every product of a model (that is the float file); LSTMs, since an override leaves one in
float and its integers were never slower; and TensorRT, which chooses between
its integer and float kernels by measuring when it builds an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.errors import UsageError
from qtool.exporting.gates.end_to_end import sqnr_in_torch
from qtool.exporting.groups import Block, Group, blocks, candidates, kernel_seconds
from qtool.exporting.revert import in_float
from qtool.exporting.to_onnx import float_to_onnx, quantized_to_onnx, save
from qtool.form import Plan, QuantizedModel

MAX_CANDIDATES = 4
WORTH_MEASURING = 0.005
MAX_LOSS_DB = 0.5
LEAST_GAIN = 1.01
SECONDS_PER_ELEMENT = 0.4e-9  # a conversion and the reordering beside it, on one core: what it is to be beaten by
PRODUCTS = frozenset({"conv", "linear"})
PROVIDERS = {"ort-cpu": "cpu", "openvino": "openvino"}
"""The runtime that a target's files are measured in."""

Race = Callable[[Mapping[str, Path]], Mapping[str, Mapping[str, Any]]]
"""Times files side by side: by name, ``speedup`` over the first and its ``speedup_ci95``."""
Profile = Callable[[Path], Sequence[tuple[str, float]]]
"""A file's kernels in order of execution: name and seconds."""


@dataclass(frozen=True)
class Measured:
    """A group that was raced: how many times faster the whole file is with it in float, and the 95 % interval."""

    group: Group
    speedup: float
    bounds: tuple[float, float]

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond doubt, and by enough to be worth its larger weights."""
        return self.bounds[0] > 1 and self.speedup >= LEAST_GAIN


def tune(
    quantized: QuantizedModel, integer: Path, opset: int, samples: Sequence[Any], *,
    race: Race, profile: Profile, batch_size: int = 1,
) -> tuple[QuantizedModel, dict[str, Any]]:  # fmt: skip
    """The model with what is slower in integers taken back to float, and what was found, as plain values.

    ``integer`` is the model's file, beside which those that it is raced with are written. ``samples`` judge the
    accuracy. Raises UsageError for a model without its float reference, and for a target that is not in ``PROVIDERS``.
    """
    check(quantized)
    found = blocks(quantized.graph, quantized.plan)
    groups = _promising(quantized, found, integer, opset, profile, batch_size)
    if not groups:
        return quantized, {"groups": [], "verdict": "no group of units is predicted to be faster in float: none raced"}
    raced = _race(quantized, groups, integer, opset, race)
    chosen = _compatible([m for m in raced if m.faster], _products(quantized.plan))
    if len(chosen) > 1:
        together = Group("together", tuple(name for m in chosen for name in m.group.units), 0.0)
        both = _race(quantized, [together, chosen[0].group], integer, opset, race)
        chosen = chosen if both[0].faster and both[0].speedup >= both[1].speedup else chosen[:1]
    return _accepted(quantized, chosen, raced, samples)


def check(quantized: QuantizedModel) -> None:
    """Raises UsageError for what cannot be tuned."""
    require_timed(quantized.plan)
    if quantized.float_graph is None:
        raise UsageError("--tune", "a model with its float reference", "none", "pass float_model=…, or leave it out")


def require_timed(plan: Plan) -> None:
    """Raises UsageError for a plan whose target has no kernels to time."""
    if plan.target not in PROVIDERS:
        raise UsageError(
            "--tune", f"target {' or '.join(map(repr, PROVIDERS))}, whose kernels can be timed by name",
            f"'{plan.target}'", "leave it out",
        )  # fmt: skip


def _promising(
    quantized: QuantizedModel, found: Sequence[Block], integer: Path, opset: int, profile: Profile, batch_size: int
) -> list[Group]:  # fmt: skip
    """The groups worth a measurement, the most promising first."""
    assert quantized.float_graph is not None
    floats = integer.with_name("fp32.onnx")
    save(float_to_onnx(quantized.float_graph, quantized.example, opset, quantized.plan.target), floats)
    seconds = [kernel_seconds(profile(path), quantized.plan, found) for path in (integer, floats)]
    conversions = [block.elements * batch_size * SECONDS_PER_ELEMENT for block in found]
    products = _products(quantized.plan)
    integers = {unit.name for unit in quantized.plan.integer_units}
    fixed = {unit.name for unit in quantized.plan.integer_units if unit.kind == "recurrent"}
    groups = candidates(found, list(zip(*seconds, strict=True)), conversions)
    worth = WORTH_MEASURING * sum(seconds[0])
    possible = (
        g for g in groups if not products <= set(g.units) and integers & set(g.units) and not fixed & set(g.units)
    )
    return [g for g in possible if g.saves >= worth][:MAX_CANDIDATES]


def _products(plan: Plan) -> set[str]:
    """The names of the integer units that multiply: one of them at least stays integer."""
    return {unit.name for unit in plan.integer_units if unit.kind in PRODUCTS}


def _race(quantized: QuantizedModel, groups: Sequence[Group], integer: Path, opset: int, race: Race) -> list[Measured]:
    files = {"int8": integer}
    for index, group in enumerate(groups):
        reverted = in_float(quantized, dict.fromkeys(group.units, "measured in float"))
        files[str(index)] = integer.with_name(f"{index}.onnx")
        save(quantized_to_onnx(reverted, opset), files[str(index)])
    times = race(files)
    outcome = []
    for index, group in enumerate(groups):
        low, high = times[str(index)]["speedup_ci95"] or (0.0, float("inf"))
        outcome.append(Measured(group, float(times[str(index)]["speedup"]), (float(low), float(high))))
    return outcome


def _compatible(faster: Sequence[Measured], products: set[str]) -> list[Measured]:
    """The fastest, and behind it each that has no unit in common with those before it and leaves a product integer."""
    chosen: list[Measured] = []
    for measured in sorted(faster, key=lambda m: -m.speedup):
        taken = {name for other in chosen for name in other.group.units}
        units = set(measured.group.units)
        if not taken & units and not products <= taken | units:
            chosen.append(measured)
    return chosen


def _accepted(
    quantized: QuantizedModel, chosen: Sequence[Measured], raced: Sequence[Measured], samples: Sequence[Any]
) -> tuple[QuantizedModel, dict[str, Any]]:
    """The reverted model where it is as accurate, else the one that was given; and the account of it."""
    reasons = {name: _reason(m) for m in chosen for name in m.group.units}
    judged = list(samples) or [quantized.example]
    before = sqnr_in_torch(quantized, judged)
    tuned = in_float(quantized, reasons) if reasons else quantized
    after = sqnr_in_torch(tuned, judged) if reasons else before
    kept = bool(reasons) and after >= before - MAX_LOSS_DB
    account = {
        "groups": [_told(m, kept and m in chosen, m in chosen) for m in raced],
        "sqnr_db_before": before, "sqnr_db_after": after if kept else before,
        "verdict": f"{len(chosen)} of {len(raced)} groups run in float" if kept else "every group stays in integers",
    }  # fmt: skip
    return (tuned if kept else quantized), account


def _reason(measured: Measured) -> str:
    low, high = measured.bounds
    return (
        f"the file is {measured.speedup:.2f}x as fast ({low:.2f} to {high:.2f}) with '{measured.group.name}' in float"
    )


def _told(measured: Measured, in_float: bool, chosen: bool) -> dict[str, Any]:
    if in_float:
        why = _reason(measured)
    elif chosen:
        why = f"it is faster, but the SQNR to FP32 falls by more than {MAX_LOSS_DB} dB"
    elif measured.faster:
        why = "another was taken, which shares units with it, does better alone or leaves no other product in integers"
    else:
        why = f"in float the file is {measured.speedup:.2f}x as fast, which is not faster beyond doubt"
    return {
        "name": measured.group.name, "units": list(measured.group.units), "in_float": in_float, "reason": why,
        "speedup": measured.speedup, "speedup_ci95": list(measured.bounds),
        "predicted_saving_us": measured.group.saves * 1e6,
    }  # fmt: skip


def retune(quantized: QuantizedModel, account: Mapping[str, Any]) -> QuantizedModel:
    """The model as an earlier account of the same file on the same machine says, without measuring again."""
    reasons = {name: group["reason"] for group in account["groups"] if group["in_float"] for name in group["units"]}
    return in_float(quantized, reasons) if reasons else quantized
