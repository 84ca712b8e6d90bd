"""Being here puts this folder on the import path, so that tests share ``nets`` and ``onnx_files``.

The fixtures give what the tests of the stages and the command line stand on: a data set and a net that
train, quantize and export in seconds.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# One thread everywhere, before torch is imported: a sum split over threads has other last bits, and tests compare
# runs in this process with runs in processes of their own, which inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import warm
from hypothesis import HealthCheck, settings

from qtool.system import allocator

# A fifth of the tests' time went into looking for garbage among what libraries and test modules hold: not while they
# are imported, and more rarely than Python has it.
gc.disable()
gc.set_threshold(2000, 20, 20)

# How long an example takes says nothing here: these tests run beside others, on machines with others.
settings.register_profile("qtool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qtool")


def bright_bands(folder: Path, parts: dict[str, int], noise: int, band: int) -> str:
    """The spec of parts of so many images, 8×8 grey, in three classes told apart by where a band is brighter."""
    draw = np.random.default_rng(0)
    for part, count in parts.items():
        labels = np.arange(count) % 3
        images = draw.integers(0, noise, (count, 8, 8), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label : 2 * label + 3] += band
        np.savez(folder / f"{part}.npz", images=images, labels=labels)
    return f"npz:{folder}"


@pytest.fixture(autouse=True)
def _collects_no_garbage_for_others() -> None:
    """A command that an earlier test ran in this process has had each export after it collect all garbage."""
    allocator._tuned = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that at the end no worker has a long one left when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.enable()


_begun = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _looks_for_garbage_among_new_objects() -> None:
    """A full collection, as each training ends with, would look at all test modules and libraries: half a second."""
    if next(_begun) % 4 == 0:
        gc.collect()
        gc.freeze()  # again, since a command thaws what there is


@pytest.fixture(scope="session", autouse=True)
def _looks_operators_up_once() -> Iterator[None]:
    """torch looks a thousand operators up by their names for each file that it writes, though none was added since."""
    import torch
    from torch._export import utils

    look_up, known = utils._materialize_cpp_cia_ops, []

    def once() -> None:
        from_where = [len(sys.modules), len(torch.library._defs), len(torch.ops.loaded_libraries)]
        if from_where != known:
            look_up()
            known[:] = from_where

    with mock.patch.object(utils, "_materialize_cpp_cia_ops", once):
        yield


@pytest.fixture(scope="module")
def warm_launches() -> Iterator[None]:
    """Has :mod:`qtool.system.launcher` start processes that find torch imported; see :mod:`warm`."""
    with warm.launched():
        yield


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of 240 training and 96 test images; see :func:`bright_bands`."""
    return bright_bands(tmp_path_factory.mktemp("small"), {"train": 240, "test": 96}, noise=120, band=100)


@pytest.fixture(scope="session")
def held_out_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 300 validation images, and harder."""
    parts = {"train": 240, "validation": 300, "test": 30}
    return bright_bands(tmp_path_factory.mktemp("held"), parts, noise=160, band=60)


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.last = nn.Linear(8 * 4, 3)

    def forward(self, x):
        x = self.first(x)
        x = torch.relu(x + self.second(x))
        return self.last(nn.functional.max_pool2d(x, 4).flatten(1))

def build():
    return Net()
"""


@pytest.fixture
def small_net(tmp_path: Path) -> str:
    """The spec of a net of the user's own, for :func:`small_data`: convolutions, batch-norm, a residual sum."""
    file = tmp_path / "net.py"
    file.write_text(NET)
    return f"{file}:build"


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory, small_data: str) -> Path:
    """A recipe that does all stages for :func:`small_net` in seconds."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "net.py").write_text(NET)
    (folder / "small.toml").write_text(f"""
model = "{folder}/net.py:build"
data = "{small_data}"
[train]
epochs = 3
batch_size = 16
checkpoint_every = 10
[quantize]
calibration = "train:64"
[qat]
epochs = 2
batch_size = 16
checkpoint_every = 5
[export]
parity_samples = 32
reference_samples = 2
[benchmark]
seconds = 0.05
allow_slower = true
""")
    return folder / "small.toml"
