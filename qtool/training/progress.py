"""How far a training is: step, loss, learning rate, memory, and the last validation.

Each step moves a bar on standard error; a caller's function, which may write a log, is given a line an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qtool.steps.history import Progress
from qtool.system.quiet import bar_console
from qtool.units import bytes_told

Report = Callable[[Progress], None]


@contextmanager
def reporter(wanted: bool | Report | None) -> Iterator[Report | None]:
    """What the loop reports to: a bar for True, ``wanted`` itself where it is a function, nothing otherwise."""
    if wanted is not True:
        yield wanted or None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("train"), BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Bar(*columns, console=bar_console()) as bar:
        task = bar.add_task("", total=None)
        yield lambda at: bar.update(task, completed=at.step, total=at.total_steps, description=describe(at))


def each_epoch(progress: bool | Callable[[str], None]) -> bool | Report:
    """What :func:`reporter` is to be given where a caller wants a bar, none, or a line of text for each epoch."""
    if not callable(progress):
        return bool(progress)
    return lambda at: progress(f"train: {describe(at)}") if at.ends else None


def describe(at: Progress) -> str:
    """One line of numbers; of the last validation, the metric that decides.

    >>> describe(Progress(5, 10, 0, 0.512345, 2e-3, 3 * 2**20, {"validation_loss": 0.4, "validation_f1": 0.9}, "f1"))
    'epoch 1 loss 0.5123 rate 0.002 3.00 MiB f1 0.9'
    >>> describe(Progress(5, 10, 0, 0.0000312345, 2e-3, 0, {}, "f1"))  # towards the float model's answers, in QAT
    'epoch 1 loss 3.123e-05 rate 0.002 0 bytes'
    """
    memory = bytes_told(at.memory_bytes)
    loss = f"{at.loss:.4g}" if 1e-8 < abs(at.loss) < 0.01 else f"{at.loss:z.4f}"
    parts = [f"epoch {at.epoch + 1}", f"loss {loss}", f"rate {at.learning_rate:.2g}", memory]
    judged, name = at.metrics.get(f"validation_{at.metric}"), "validation loss" if at.metric == "loss" else at.metric
    return " ".join(parts if judged is None else [*parts, f"{name} {judged:z.3g}"])
