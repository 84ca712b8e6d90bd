from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from qtool.memory import measure


def block(at: int, size: int, device: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: "[memory]", start_ns=lambda: at, nbytes=lambda: size, device_type=lambda: device
    )


def test_a_gpu_s_blocks_are_not_counted_as_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler tells of both."""
    told = [block(2, -4, DeviceType.CPU), block(1, 700, DeviceType.CUDA), block(0, 4, DeviceType.CPU)]
    profiled = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: told))
    monkeypatch.setattr(measure, "profile", lambda **_: nullcontext(profiled))
    assert measure.allocations(lambda: "made") == ([4, -4], "made")
