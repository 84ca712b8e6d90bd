"""What the caller's process has set neither changes a stage nor is changed by it."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qtool
from qtool.errors import QtoolError
from qtool.system.generators import generators_kept

STAGES = ("quantize", "qat", "sensitivity", "train", "predict_memory")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def done(stage: str, model: nn.Module, labelled: list[Any]) -> Any:
    inputs = [batch for batch, _ in labelled]
    work: dict[str, Callable[[], Any]] = {
        "quantize": partial(qtool.quantize, model, inputs),
        "qat": partial(qtool.quantize, model, labelled, mode="qat", epochs=1),
        "sensitivity": partial(qtool.sensitivity, model, inputs),
        "train": partial(qtool.train, model, labelled, epochs=1),
        "predict_memory": partial(qtool.predict_memory, model, labelled),
    }
    return work[stage]()


@pytest.fixture
def labelled() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(3)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def parameters_swapped() -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def draws() -> tuple[Any, ...]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@pytest.mark.parametrize("stage", STAGES)
def test_random_generators_are_left_as_they_were(stage: str, labelled: list[Any]) -> None:
    model = net()
    with generators_kept():
        expected = draws()
    done(stage, model, labelled)
    assert draws() == expected


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "set_by_the_caller",
    [
        torch.inference_mode, torch.no_grad, partial(torch.autocast, "cpu"), partial(default_dtype, torch.float64),
        partial(torch.device, "meta"), parameters_swapped,
    ],
)  # fmt: skip
def test_a_stage_does_not_see_what_the_caller_has_set(
    stage: str, set_by_the_caller: Callable[[], AbstractContextManager[Any]], labelled: list[Any]
) -> None:
    model = net()
    with set_by_the_caller():
        result = done(stage, model, labelled)
    if stage == "quantize":
        assert all(unit.integer for unit in result.plan.units)


def test_a_half_that_underflows_is_exported_though_the_caller_has_numpy_raise(tmp_path: Path) -> None:
    model, x = net(), torch.randn(8, 8)
    with torch.no_grad():
        model[0].weight[0, 0] = 1e-8
    with np.errstate(all="raise"):
        assert "fp16" in qtool.export(qtool.quantize(model, [x]), tmp_path, samples=[x]).files
        assert set(np.geterr().values()) == {"raise"}


def test_a_model_made_in_inference_mode_is_told_as_such(labelled: list[Any]) -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(QtoolError, match="make the model outside of torch"):
        qtool.train(model, labelled)


KINDS = (
    torch.backends.mkldnn.conv,
    torch.backends.mkldnn.rnn,
    torch.backends.mkldnn.matmul,
    torch.backends.cuda.matmul,
)


@pytest.mark.parametrize(
    "setting",
    [None, torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv],
)
def test_float32_products_are_those_of_float32(setting: Any, labelled: list[Any], tmp_path: Path) -> None:
    class Telling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.update(kind.fp32_precision for kind in KINDS)
            return super().forward(x)

    def lower(precision: str, newer: str) -> None:
        if setting is None:
            torch.set_float32_matmul_precision(precision)
        else:
            setting.fp32_precision = newer

    told: set[str] = set()
    inputs = [batch for batch, _ in labelled]
    lower("medium", "tf32")
    try:
        before = [kind.fp32_precision for kind in KINDS]
        qtool.export(qtool.quantize(Telling(8, 4), inputs), tmp_path, samples=inputs)
        assert [kind.fp32_precision for kind in KINDS] == before
    finally:
        lower("highest", "none")
    assert told <= {"ieee", "none"}
    assert told
    assert "tf32" in before


def test_stages_that_go_on_at_once_leave_what_the_first_one_met(labelled: list[Any]) -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            here.set()
            assert there.wait(60)
            return super().forward(x)

    class Last(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            there.set()
            first.result()
            assert torch.get_default_dtype() == torch.float32
            return super().forward(x)

    here, there = threading.Event(), threading.Event()
    slow, last = Slow(8, 4), Last(8, 4)
    with generators_kept():
        expected = draws()
    with default_dtype(torch.float64), ThreadPoolExecutor(2) as pool:
        first = pool.submit(qtool.train, slow, labelled, epochs=1)
        assert here.wait(60)
        pool.submit(qtool.train, last, labelled, epochs=1).result()
    assert draws() == expected


def test_export_adds_no_folder_to_the_path(labelled: list[Any], tmp_path: Path) -> None:
    quantized = qtool.quantize(net(), [batch for batch, _ in labelled])
    before = list(sys.path)
    qtool.export(quantized, tmp_path, samples=[batch for batch, _ in labelled])
    assert sys.path == before
