"""Ranges that no data decides: those of an operator whose results are known, and the bytes of images."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qtool.graphs.pixels import LEVELS, PIXELS, ZERO
from qtool.quantization.prepared import Prepared


def fix_ranges(prepared: Prepared, known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Tells observers what the operator decides: the whole range, or limits at which the quantizer has to clip.

    The bytes of images are where ``known`` ranges have them.
    """
    for placed in prepared.placement.placed:
        observer = prepared.observers.get(placed.unit.name)
        if observer is None or placed.pattern is None or placed.pattern.shares:
            continue
        observer.limits = placed.limits
        if placed.pattern.fixed:
            observer.fix(*placed.pattern.fixed)
    for name, zero in _images(prepared).items():
        low = known[name]["low"] if name in known else float(-zero)
        prepared.observers[name].fix(low, low + LEVELS - 1)


def _images(prepared: Prepared) -> dict[str, int]:
    """What is quantized to its bytes, by name, and the byte that stands for zero."""
    nodes = prepared.placement.graph_module.graph.find_nodes(op="call_function", target=PIXELS)
    return {prepared.placement.name_of(node): node.meta[ZERO] for node in nodes}


def cover_images(prepared: Prepared) -> list[str]:
    """Moves the bytes of images to where all samples have theirs; returns what to say of those that have more.

    They were placed by the first samples, which may be darker than others: those of one class, say.
    """
    notes = []
    for name in _images(prepared):
        observer = prepared.observers[name]
        least, most = round(observer.histogram.minimum), round(observer.histogram.maximum)
        assert observer.fixed is not None
        if observer.fixed[0] <= least and most <= observer.fixed[1]:
            continue
        low = min(max(least - (LEVELS - 1 - (most - least)) // 2, 1 - LEVELS), 0)
        observer.fix(float(low), float(low + LEVELS - 1))
        if not low <= least <= most < low + LEVELS:
            notes.append(
                f"pixels: '{name}' takes more than {LEVELS} steps in all samples: those at the ends are clipped"
            )
    return notes
