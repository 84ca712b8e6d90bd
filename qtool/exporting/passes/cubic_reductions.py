"""Writes a cubic resizing that samples while it makes images smaller as matrix products, one for each axis.

ONNX Runtime (1.31) opens a file with such a Resize and fails when it runs: it interpolates by cubics between numbers
where there come to be more of them, or averages (``antialias``). Along an axis number i of the result lies at

    c = (i + 1/2) / s - 1/2,    or i (before - 1) / (after - 1) where corners are kept,

and is the sum of the four numbers around c with the weights of Keys' cubic (1981), those beyond an edge being the
edge's own. So torch has it.

Left out on purpose: sizes that are not known, and coordinates that torch has not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.smooth_resizes import Weights, changed, coefficient, is_plain, keys, multiply, text

_CORNERS = "align_corners"


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many resizings are products now."""
    return multiply(model, _weights)


def _weights(node: ir.Node) -> Weights:
    """The weights for each axis that a sampling cubic Resize changes where it makes one smaller; else none."""
    cubic, told = coefficient(node), node.attributes
    way = text(node, "coordinate_transformation_mode", "half_pixel")
    if cubic is None or not is_plain(node) or way not in ("half_pixel", _CORNERS):
        return {}
    if told.get_int("antialias", 0) or told.get_int("exclude_outside", 0):
        return {}
    changes = changed(node)
    if all(after > before for before, after, _ in changes.values()):
        return {}
    return {axis: sampled(*change, cubic, corners=way == _CORNERS) for axis, change in changes.items()}


def sampled(before: int, after: int, scale: float, cubic: float, *, corners: bool) -> npt.NDArray[np.float32]:
    """The weights of ``before`` numbers in each of ``after``, as a matrix of after × before."""
    rows = np.arange(after)
    places = rows * ((before - 1) / max(after - 1, 1)) if corners else (rows + 0.5) / scale - 0.5
    weights = np.zeros((after, before))
    for tap in range(-1, 3):
        column = np.floor(places).astype(np.int64) + tap
        np.add.at(weights, (rows, column.clip(0, before - 1)), keys(np.abs(places - column), cubic))
    found: npt.NDArray[np.float32] = weights.astype(np.float32)
    return found
