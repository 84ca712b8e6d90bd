"""What training would need: predicted, and on request measured in a fresh process.

Run as a module this file is that process: one line of JSON on standard input asks, one JSON object on what was standard
output answers. It ends when standard input does: nobody waits for the answer then.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError, UsageError, one_line
from qtool.models.given import open_model, require_model
from qtool.options import documented, make
from qtool.recipe import AUTO, TrainConfig, as_dict
from qtool.source import open_source
from qtool.stages.common import configured
from qtool.stages.surroundings import apart

if TYPE_CHECKING:
    from torch import nn

    from qtool.tasks import Task

Spec = dict[str, Any]


@apart
@documented(TrainConfig)
def predict_memory(
    model: nn.Module | str,
    data: object,
    *,
    task: Task | str = "classification",
    measure: bool = False,
    train: bool = False,
    config: TrainConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Predicts the peak memory of training ``model`` on ``data``; with ``measure`` also takes a few real steps.

    With ``train`` the process that measures then trains as the config says: time of a step with all that a training
    does between two (``seconds_alone`` is that of the measured steps, without), last loss, test metrics.
    The prediction is then made in a process of its own too, so that many can follow each other.

    ``options`` are the fields of TrainConfig. Weights are not loaded: their values change nothing. The result is plain
    values; peaks are in bytes. Raises UsageError for ``measure`` with objects, which have no spec that another process
    could open.
    """
    config = configured(TrainConfig, config, options)
    from qtool.training import rules

    rules.check(config)
    require_model(model)
    spec = {"model": model, "data": data, "task": task}
    require_named(config)
    if measure and not all(isinstance(value, str) for value in spec.values()):
        raise UsageError("argument 'measure'", "model, data and task as specs", "an object", "pass specs")
    predicted = _in_fresh_process(spec, config, "predict") if train else _predicted(spec, config)
    result = {
        "source": {key: value if isinstance(value, str) else type(value).__name__ for key, value in spec.items()},
        "config": as_dict(config),
        "predicted": predicted,
    }
    if measure:
        result["measured"] = measured = _in_fresh_process(spec, config, "train" if train else "measure")
        result["error"] = predicted["peak_bytes"] / measured["peak_bytes"] - 1
    return result


def require_named(config: TrainConfig) -> None:
    """Raises UsageError for a config that leaves the batch or the techniques open: its peak is what decides them."""
    if config.batch_size == AUTO:
        raise UsageError("--batch-size auto", "a number", "auto", "name one here: train tells which it found")
    if config.memory_budget is not None:
        raise UsageError(
            "--memory-budget", "the techniques themselves, whose peak is told", config.memory_budget,
            "leave it out here: train chooses, and tells what",
        )  # fmt: skip


def _arguments(spec: Spec, config: TrainConfig) -> tuple[tuple[Callable[[], Any], tuple[Any, Any], TrainConfig], int]:
    """How the model is built, one batch of the training data, and the config, with a given batch's size.

    Beside them is of how many batches it is the largest.
    """
    from qtool.nested import num_samples
    from qtool.steps.order import largest_seen

    source = open_source(None, spec["data"], seed=config.seed)
    batch, seen = largest_seen(source.parts and source.parts.train, source.data, config)
    if source.parts is None:
        config = replace(config, batch_size=num_samples(batch[0]))
    return (lambda: open_model(spec["model"], source.record, None, config.seed), batch, config), seen


def _parts(spec: Spec, config: TrainConfig) -> dict[str, Any]:
    """The techniques and the loss: what the floor cannot know by itself."""
    from qtool.source import open_task
    from qtool.steps.loop import task_loss
    from qtool.training.techniques import setup

    return {"prepare": setup, "loss": task_loss(open_task(spec["task"], config.label_smoothing))}


def _predicted(spec: Spec, config: TrainConfig) -> dict[str, Any]:
    from qtool.memory.predict import NotPredicted, predict
    from qtool.nested import tensors

    arguments, seen = _arguments(spec, config)
    inputs = [list(tensor.shape) for tensor in tensors(arguments[1][0])]
    try:
        found = predict(*arguments, **_parts(spec, config))
    except NotPredicted as error:  # its advice is for who trains
        do = "have it estimated from the number of parameters alone: qtool memory --params N"
        raise QtoolError(error.where, error.expected, error.got, do) from error
    return asdict(found) | {"inputs": inputs, "largest_of": seen}


def trained(spec: Spec, config: TrainConfig) -> dict[str, Any]:
    """What a training in a process of its own measures, beside its last loss and its test metrics."""
    return _in_fresh_process(spec, config, "train")


def _in_fresh_process(spec: Spec, config: TrainConfig, work: str = "measure") -> dict[str, Any]:
    """What another process answers that does ``work``: predict, measure, or train after measuring."""
    from qtool.system.devices import killed_since, memory_kills

    kills = memory_kills()
    with TemporaryDirectory() as folder:  # not the other process's, which ends at once when this one does
        request = json.dumps({**spec, "config": as_dict(config), "work": work, "folder": folder})
        code, told, said = _asked(request)
    if code or not told.strip():
        short = code == -9 and killed_since(kills)
        how = "a kill, probably for lack of host memory" if short else f"exit code {code}"
        raise QtoolError(
            "measurement", "a few steps in a fresh process", f"{how}: {one_line(said[-300:])}",
            f"use a smaller --batch-size{', or leave --measure out' if work == 'measure' else ''}",
        )  # fmt: skip
    answer: dict[str, Any] = json.loads(told)
    if "error" in answer:
        raise (UsageError if answer["usage"] else QtoolError)(*answer["error"])
    return answer


def _asked(request: str) -> tuple[int, str, str]:
    """The exit code of a fresh process, its answer, and what it said on standard error."""
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "qtool.stages.memory"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=said, text=True, env=_environment(),
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, and says why
            process.stdin.write(request + "\n")
            process.stdin.flush()
        told = process.stdout.read()
        code = process.wait()
        said.seek(0)
        return code, told, said.read()


def _environment() -> dict[str, str]:
    """This environment, with the package that is running here and this folder on the path."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [root, os.environ.get("PYTHONPATH", ""), os.getcwd()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    config, work, folder = make(TrainConfig, request.pop("config")), request.pop("work"), request.pop("folder")
    try:
        if work == "predict":
            return _predicted(request, config)
        return _in_group(request, config, work, folder) if config.devices > 1 else _measured(request, config, work)
    except QtoolError as error:
        told = [error.where, error.expected, error.got, error.do]
        return {"error": told, "usage": isinstance(error, UsageError)}


def _measured(spec: Spec, config: TrainConfig, work: str) -> dict[str, Any]:
    from qtool.memory.measure import measure

    found = asdict(measure(*_arguments(spec, config)[0], **_parts(spec, config)))
    if work != "train":
        return found
    return found | {"seconds_alone": found["seconds_per_step"]} | _trained(spec, config)


def _in_group(spec: Spec, config: TrainConfig, work: str, folder: str) -> dict[str, Any]:
    """What the first of several processes answers, each in a file; the peaks are the highest of them all."""
    from qtool.system.launcher import launch

    launch(_one_of_a_group, config.devices, spec, config, work, folder)
    answers: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    highest = {key: max(answer[key] for answer in answers) for key in ("peak_bytes", "held_bytes")}
    return answers[0] | highest


def _one_of_a_group(spec: Spec, config: TrainConfig, work: str, folder: str) -> None:
    """What each launched process does."""
    from qtool.system import processes
    from qtool.system.allocator import tune
    from qtool.system.devices import resolve_device

    tune(huge_pages=False)
    with processes.joined(resolve_device(config.device)):
        answer = _measured(spec, config, work)
        (Path(folder) / f"{processes.rank():06}.json").write_text(json.dumps(answer))
        processes.wait()


def _trained(spec: Spec, config: TrainConfig) -> dict[str, Any]:
    """Trains, without counting; the median time from one step to the next is that of a step."""
    from qtool.steps.history import Progress as At
    from qtool.training import stage

    source = open_source(spec["model"], spec["data"], spec["task"], seed=config.seed)
    assert source.model is not None
    ticks: list[float] = []

    def tick(at: At) -> None:
        if not at.ends:
            ticks.append(time.perf_counter())

    done = stage.train(source.model, source.data, config, task=source.task, progress=tick)
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    found = {"loss": done.history.losses[-1], "metrics": done.metrics, "train_seconds": done.history.seconds}
    return found | ({"seconds_per_step": statistics.median(steps)} if steps else {})


def main() -> None:
    """Answers one request, with standard input and output kept for the two alone."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    request = json.loads(requests.readline())
    from qtool.system.allocator import tune
    from qtool.system.launcher import end_after

    end_after(requests.read)
    tune(huge_pages=False)
    answers.write(json.dumps(_answer(request)))
    answers.close()


if __name__ == "__main__":
    main()
