"""Processes that the kernel itself kills for lack of memory, in a control group (made here where that is allowed)."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn

from qtool.options import make
from qtool.recipe import TrainConfig
from qtool.source import open_source
from qtool.stages import choice
from qtool.system import devices
from qtool.system.control_groups import control_groups

LIMIT = 1500 * 2**20
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "qtool")


class Hungry(nn.Module):
    """Touches 2 GiB in a pass over more than 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 16 and not isinstance(x, torch._subclasses.FakeTensor):
            x = x + torch.ones(2**29)[0]
        return self.head(x.flatten(1))


def hungry() -> nn.Module:
    return Hungry()


Run = Callable[..., warm.Started]


def _remove(folder: Path) -> None:
    """Takes the group away, when what is left in it has ended (whoever watched over processes ends after them)."""
    for _ in range(100):
        for line in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} is still in use")


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Run]:
    """Runs a function in a process of its own, to its end, in a control group with ``LIMIT`` bytes."""
    outer = next((group for group in control_groups("memory") if Path(group.folder).is_dir()), None)
    if outer is None:
        pytest.skip("no control groups")
    folder = Path(outer.folder) / f"test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if outer.first else "memory.max")).write_text(str(LIMIT))
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip("no leave to make a control group")

    def run(function: Callable[..., object], *arguments: Any) -> warm.Started:
        return warm.Started(tmp_path / "said", warm.in_group, folder / "cgroup.procs", function, *arguments)

    yield run
    _remove(folder)


def words(small_data: str, out: Path, batch_size: int) -> list[str]:
    """Of a training whose batch was found by itself, so that its micro-batches may be halved; no prediction is made."""
    options = {"device": "cpu", "epochs": 9, "max_steps": 3, "batch_size": "auto"}
    predicted = {"predicted_peak_bytes": 1, "limit_bytes": 1, "considered": [], "why": "it is given"}
    told = {"asked": "--batch-size auto", "flags": f"--batch-size {batch_size}"}
    inputs = open_source(f"{__file__}:hungry", small_data, seed=0).inputs
    choice.record(out, make(TrainConfig, options), inputs, {"chosen": {"batch_size": batch_size}} | told | predicted)
    return [
        "train", "--model", f"{__file__}:hungry", "--data", small_data, "--out", str(out), "--device", "cpu",
        "--epochs", "9", "--max-steps", "3", "--batch-size", "auto",
    ]  # fmt: skip


def halvings(out: Path) -> Any:
    return json.loads((out / "train.json").read_text())["history"]["halvings"]


@pytest.mark.slow
def test_a_run_alone_goes_on_in_smaller_micro_batches_when_it_is_given_again(
    limited: Run, small_data: str, tmp_path: Path
) -> None:
    given = words(small_data, tmp_path / "run", 32)
    assert [limited(warm.command, *given).end() for _ in range(2)] == [-signal.SIGKILL, 0]
    assert halvings(tmp_path / "run") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_several_processes_go_on_by_themselves(
    limited: Run, small_data: str, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    given = words(small_data, run, 64)
    if launcher:
        done = limited(warm.torchrun_of_forks, *launcher, *given)
    else:
        done = limited(warm.launching, *given, "--devices", "2")
    assert done.end() == 0, done.said()[-3000:]
    assert "out of memory; again" in done.said() or "probably for lack of host memory" in done.said()
    assert halvings(run) == 1


def tell_free() -> None:
    print(devices.memory_free(torch.device("cpu")), flush=True)


def test_what_is_free_is_what_the_group_has_left(limited: Run) -> None:
    done = limited(tell_free)
    assert done.end() == 0
    assert LIMIT / 2 < int(done.said()) < LIMIT
