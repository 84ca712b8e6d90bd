"""Calibration: one streaming pass of batches through a graph with observers.

Labels are not looked at, nothing is kept of a batch but what the observers record, and afterwards each
quantized tensor gets one range, read from its histogram by the estimator asked for. What was observed
and what was chosen is plain data (``ranges.json``), so that the same quantization can be repeated
without the samples. A batch goes through in pieces of ``MICRO_BATCH`` samples: what is observed does not depend on it,
and activations of one piece at a time are all the memory that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.fx import GraphModule

from qtool.errors import QtoolError
from qtool.form import check_inputs
from qtool.forward import passes_told
from qtool.nested import call, micro_batches, num_samples
from qtool.quantization.calibration.observers import RangeObserver
from qtool.quantization.prepared import Prepared
from qtool.quantization.ranges import estimate
from qtool.quantization.ranges.histogram import Histogram
from qtool.recipe import QuantizeConfig
from qtool.units import few

MICRO_BATCH = 8


def calibrate(prepared: GraphModule, batches: Iterable[Any]) -> int:
    """Runs every batch through ``prepared`` without gradients; returns the number of samples.

    Raises QtoolError when there is no batch, when a batch is not what the graph takes, and when a layer's values
    are NaN or infinite (the layer is named).
    """
    count, observers = 0, [module for module in prepared.modules() if isinstance(module, RangeObserver)]
    with torch.no_grad():
        for index, batch in enumerate(batches):
            check_inputs(prepared, batch, f"calibration batch {index}")
            with passes_told(f"the model on calibration batch {index}"):
                for piece in micro_batches(batch, MICRO_BATCH):
                    for observer in observers:
                        observer.num_samples = num_samples(piece)
                    call(prepared, piece)
            count += num_samples(batch)
    for observer in observers:
        observer.num_samples = None
    if count == 0:
        raise QtoolError("calibration", "at least one sample", "none", "pass at least one batch of inputs")
    return count


def require_reached(prepared: Prepared, count: int) -> None:
    """Raises QtoolError naming the layers that none of ``count`` samples reached: experts that got nothing to do.

    Nothing is known of their range, and any that was made up would be wrong for the first sample that does.
    """
    empty = {name for name, observer in prepared.observers.items() if not observer.reached}
    if not empty:
        return
    layers = prepared.placement.layers
    read = prepared.placement.name_of
    names = [p.unit.name for p in layers if empty & {p.unit.name, *map(read, p.operands)}] or sorted(empty)
    floats = ",".join(f"{name}=float" for name in names)
    raise QtoolError(
        f"layer{'s' if names[1:] else ''} {few([f'{name!r}' for name in names])}",
        "calibration samples that reach every layer", f"none of {count} does",
        f"calibrate on samples that do, or on more, or leave in float what nothing reaches (--overrides '{floats}')",
    )  # fmt: skip


def choose_ranges(observers: Mapping[str, RangeObserver], config: QuantizeConfig) -> dict[str, Any]:
    """Gives every observer the range that ``config.ranges`` reads from its histogram; returns them as plain data."""
    ranges = {}
    for name, observer in observers.items():
        low, high = estimate(
            observer.histogram, config.ranges, **asdict(observer.options) | {"percentile": config.percentile}
        )
        method = config.ranges if observer.fixed is None else "fixed"
        low, high = observer.chosen = observer.fixed or (low, high)
        ranges[name] = {
            "low": low, "high": high, "method": method, "observed": observer.histogram.state_dict(),
        }  # fmt: skip
    return ranges


def restore_ranges(observers: Mapping[str, RangeObserver], ranges: Mapping[str, Any], where: str) -> None:
    """Gives every observer the range saved under its name. Raises QtoolError when one is missing."""
    for name, observer in observers.items():
        if "low" not in ranges.get(name, ()):
            raise QtoolError(
                where, f"a range for '{name}'", f"ranges for {len(ranges)} other tensors",
                "use the ranges of the same model, target and overrides",
            )  # fmt: skip
        saved = ranges[name]
        observer.chosen = (float(saved["low"]), float(saved["high"]))
        if observer.fixed is not None:
            observer.fix(*observer.chosen)
        if saved.get("observed"):
            observer.histogram = Histogram.from_state(saved["observed"])
