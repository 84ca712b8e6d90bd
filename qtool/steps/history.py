"""What a training tells of itself: step by step while it runs, and all of it when it is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """Where a run is, after each step, and once more where an epoch ``ends``, the loss being its mean then.

    ``memory_bytes``: see ``qtool.system.devices.memory_used``; at most 0.1 s old. ``metrics`` are those of the last
    epoch, ``metric`` the task's that decides: ``validation_`` stands before it there.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    learning_rate: float
    memory_bytes: int
    metrics: Mapping[str, float]
    metric: str
    ends: bool = False


@dataclass
class History:
    """What happened: one loss per step, one dict of metrics per epoch."""

    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # how many steps were done after each epoch
    skipped_steps: int = 0
    halvings: int = 0  # how often micro-batches were made half as large for lack of memory
    best_epoch: int | None = None
    best_metric: float | None = None
    stopped_early: bool = False
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)
