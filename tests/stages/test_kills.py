"""Processes that the kernel itself kills for lack of memory, in a control group (made here where that is allowed)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qtool.control_groups import control_groups

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
LIMIT = 2500 * 2**20
IN_GROUP = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")


class Hungry(nn.Module):
    """Touches 3 GiB in a pass over more than 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 16 and not isinstance(x, torch._subclasses.FakeTensor):
            x = x + torch.ones(3 * 2**28)[0]
        return self.head(x.flatten(1))


def hungry() -> nn.Module:
    return Hungry()


Run = Callable[..., subprocess.CompletedProcess[str]]


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
def limited() -> Iterator[Run]:
    """Runs a command of Python in a control group with ``LIMIT`` bytes."""
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

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IN_GROUP, str(folder / "cgroup.procs"), sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT)

    yield run
    _remove(folder)


def words(small_data: str, out: Path, batch_size: int) -> list[str]:
    """Of a training that keeps to a budget, so that its micro-batches may be halved."""
    return [
        "-m", "qtool", "train", "--model", f"{__file__}:hungry", "--data", small_data, "--out", str(out), "--device",
        "cpu", "--epochs", "9", "--max-steps", "3", "--batch-size", str(batch_size), "--memory-budget", "8GiB",
    ]  # fmt: skip


def halvings(out: Path) -> Any:
    return json.loads((out / "train.json").read_text())["history"]["halvings"]


@pytest.mark.slow
def test_a_run_alone_goes_on_in_smaller_micro_batches_when_it_is_given_again(
    limited: Run, small_data: str, tmp_path: Path
) -> None:
    codes = [limited(*words(small_data, tmp_path, 32)).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    assert halvings(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_several_processes_go_on_by_themselves(
    limited: Run, small_data: str, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    more = [] if launcher else ["--devices", "2"]
    done = limited(*launcher, *words(small_data, tmp_path, 64), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "out of memory; again" in done.stderr or "probably for lack of host memory" in done.stderr
    assert halvings(tmp_path) == 1


@pytest.mark.slow
def test_what_is_free_is_what_the_group_has_left(limited: Run) -> None:
    done = limited("-c", "import torch; from qtool.devices import *; print(memory_free(torch.device('cpu')))")
    assert LIMIT / 2 < int(done.stdout) < LIMIT
