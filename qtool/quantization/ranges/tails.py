"""The far ends of a tensor's values: what the network's outputs make of each value that a range would clip."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

BINS = 256
"""Bins of each tail, from the end of the inner range to the extreme."""


@dataclass
class Tails:
    """What a tensor's values beyond (``low``, ``high``) would move the network's outputs by, sample by sample.

    ``rows`` holds for each sample the sums of g in ``2 · BINS`` bins, those of the lower tail first, from the extreme
    ``least`` to ``low`` and from ``high`` to the extreme ``most``; ``energy`` the sums of g² over values not zero.
    """

    low: float
    high: float
    least: float
    most: float
    rows: list[Array] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    @property
    def edges(self) -> Array:
        """Where the bins begin, and where the last one of each tail ends: 2 × (``BINS`` + 1)."""
        return np.stack((np.linspace(self.least, self.low, BINS + 1), np.linspace(self.high, self.most, BINS + 1)))

    def clipped(self, low: Array, high: Array) -> Array:
        """E[(g · e_clip)²] of grids that reach from ``low`` to ``high``, no narrower than the inner range."""
        below, above = (self.edges[:, 1:] + self.edges[:, :-1]) / 2
        errors = np.maximum(low[:, None] - below, 0.0), np.minimum(high[:, None] - above, 0.0)
        sums: Array = np.concatenate(errors, axis=1) @ np.stack(self.rows).T
        return np.asarray((sums**2).mean(axis=1))
