"""Early stopping: the best epoch by the task's metric on the validation data, whose weights are kept and put back.

A checkpoint is of where a run is; the best weights are beside it, or in host memory where no checkpoints are written.
With them go the buffers that a model's state leaves out and that have moved (``checkpoint.Unstored``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qtool.steps import checkpoint
from qtool.steps.history import History
from qtool.steps.judging import require_metric
from qtool.steps.setup import Setup
from qtool.tasks import Task


class Best:
    """The best epoch of a run so far. Without a ``patience``, in epochs, none is looked for."""

    def __init__(
        self, setup: Setup, task: Task, patience: int | None, folder: Path | None, unstored: checkpoint.Unstored
    ) -> None:
        self.setup, self.task, self.patience, self.folder, self.unstored = setup, task, patience, folder, unstored
        self.waited = 0
        """Epochs since the best one."""
        self.first = unstored.copies() if patience is not None else {}
        self.moved: dict[str, Tensor] = {}
        """What the best epoch left in buffers that no state has, where it is not what they began with."""
        self.weights: dict[str, Any] | None = None

    def judge(self, history: History, epoch: int, metrics: Mapping[str, float], *, to_come: bool) -> bool:
        """Whether ``epoch`` is the best so far, which is written into ``history``, as is whether to stop here.

        ``metrics`` are the epoch's, the judged ones with ``validation_`` before their names. Where no step is
        ``to_come`` there is nothing to be stopped.
        """
        if self.patience is None:
            return False
        before = "validation_"
        require_metric({name.removeprefix(before) for name in metrics if name.startswith(before)}, self.task)
        value = metrics[f"{before}{self.task.metric}"]
        best, more = history.best_metric, self.task.higher_is_better
        better = not math.isnan(value) and (best is None or (value > best if more else value < best))
        self.waited = 0 if better else self.waited + 1
        history.stopped_early = to_come and self.waited >= self.patience
        if better:
            history.best_metric, history.best_epoch = value, epoch
            self.moved = self.unstored.moved()
        return better

    def keep(self) -> None:
        """Keeps the weights as they are, after the epoch's checkpoint, which has them too if it does not come to it."""
        if self.folder is None:
            self.weights = checkpoint.copied(self.setup.model)
        else:
            self.setup.files.keep_best(self.folder, self.setup.model)

    def put_back(self, history: History) -> None:
        """Has the model as the best epoch left it, where there is one."""
        if history.best_epoch is None:
            return
        # what had not moved by then is as it began, though it may have since
        self.unstored.put_back({**self.first, **self.moved})
        if self.folder is None:
            checkpoint.put_back(self.setup.model, self.weights or {})
        else:
            self.setup.files.take_best(self.folder, self.setup.model)
